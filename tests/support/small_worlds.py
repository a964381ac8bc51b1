"""Small worlds gone through exhaustively, and random overloads: does every turn end? (INV-06)

`explore` visits, breadth first, each state that two sessions on four blocks can get to in so many
moves, once: states that differ only in names (slot numbers, turn numbers, time) are one. From each
of them everything that is open must end once copies end.
"""

import pickle
import random
from collections import Counter

from engine_driver import Driver, alone

from agentserve.config import EngineSettings
from agentserve.engine.messages import Cancel
from agentserve.engine.oracle import OracleRunner
from agentserve.kv.copies import DEVICE, HOST

PROMPTS = {1: [1, 2, 3], 2: [1, 2, 9, 8]}
STEP_S = 0.06  # the order of victims is found anew with each step; nothing is overdue so soon
LONGEST = 80  # steps until all turns of a small world have ended
KINDS = ("device-lru", "lru+host", "tool-aware")


class ChosenRunner(OracleRunner):
    """An oracle of whose copies between tiers only the chosen ones end with a step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.ends: int | None = None  # the place of the only one, in the order of issue; None: all

    @property
    def flying(self):
        return self._flying

    def collect(self, handle):
        copies = self._flying.copy()
        if self.ends is not None:
            copies = copies[self.ends : self.ends + 1] if self.ends >= 0 else []
        return self.result(handle, self.land(copies))


def small_world(host_blocks: int, ahead: int = 0) -> Driver:
    """Return the world's driver; `ahead` is the depth of its runner."""
    return Driver(
        depth=ahead,
        num_blocks=4,
        block_size=2,
        host_blocks=host_blocks,
        max_context=32,
        max_slots=2,
        runner=ChosenRunner,
    )


def explore(host_blocks: int, depth: int, ahead: int = 0) -> "Counter[str]":
    """Visit all states up to `depth` moves. Raises AssertionError or InvariantError."""
    first = small_world(host_blocks, ahead)
    seen, ending = {key(first)}, set()
    level = [_freeze(first)]
    counts = Counter(states=1, moves=0)
    for left in range(depth, -1, -1):
        following = []
        for frozen in level:
            driver = pickle.loads(frozen)
            possible = moves(driver) if left else []
            check_ends(driver, ending)
            for move in possible:
                after = pickle.loads(frozen)
                apply(after, move)
                counts["moves"] += 1
                if (state := key(after)) not in seen:
                    seen.add(state)
                    following.append(_freeze(after))
        level = following
        counts["states"] += len(level)
    return counts


def check_ends(driver: Driver, ending: set) -> None:
    """Verify that all that is open ends when copies do; `ending` holds states known for that."""
    passed = []
    while driver.engine.busy and (state := key(driver)) not in ending:
        passed.append(state)
        assert len(passed) < LONGEST, "INV-06: turns do not end"
        apply(driver, "step")
    ending.update(passed)
    if not driver.engine.busy:
        stats = driver.engine.stats()
        assert stats.running == stats.waiting == stats.copies_in_flight == 0
        assert stats.blocks_locked == stats.host_locked == 0


def moves(driver: Driver) -> list[str]:
    """Return all that can happen next; "end 2" is a step in which the third copy in flight ends."""
    sequences = driver.engine._sequences
    turns = [s.turn for s in sequences.values() if s.turn is not None]
    busy = {turn.sequence.id for turn in turns}
    found = [f"submit {s}" for s in PROMPTS if s not in busy]
    for number in sequences.keys() - busy:
        found += [f"append {number}", f"ahead {number}"]
        if sequences[number].chain.length and driver.engine.stats().host_total:
            found += [f"host {number}", f"promote {number}"]
    found += [f"cancel {turn.id}" for turn in turns]
    if driver.engine.busy:
        found.append("step")
        flying = len(driver.runner.flying)
        if flying:
            found += [f"end {place}" for place in range(-1, flying) if flying > 1 or place < 0]
    return found


def apply(driver: Driver, move: str) -> None:
    """Let it happen; a step must do something, and give the tokens of the oracle."""
    name, _, argument = move.partition(" ")
    number = int(argument or 0)
    log = driver.engine._sequences[number].log if name in ("append", "ahead") else []
    if name == "submit":
        driver.submit(number, PROMPTS[number], max_tokens=4)
    elif name == "append":
        driver.submit(number, [5], keep=len(log), max_tokens=2)
    elif name == "ahead":
        driver.submit(number, [7], keep=len(log), max_tokens=0, background=True)
    elif name == "host":
        driver.hint(number, "host")
    elif name == "promote":
        driver.promote(number)
    elif name == "cancel":
        driver.engine.apply(Cancel(number))
    else:
        driver.runner.ends = number if name == "end" else None
        _step(driver)


def _step(driver: Driver) -> None:
    before = {number: list(s.log) for number, s in driver.engine._sequences.items()}
    driver.advance(STEP_S)
    for number, log in before.items():
        new = list(driver.engine._sequences[number].log)[len(log) :]
        assert new == alone(log, len(new)), f"sequence {number} went wrong after {log}"


def _freeze(driver: Driver) -> bytes:
    for told in (driver.events, driver.output, driver.finished, driver.started, driver.refused):
        told.clear()
    return pickle.dumps(driver)


def key(driver: Driver):
    """The state that decides what can happen next: turns, logs, what slots hold, what flies."""
    engine = driver.engine
    scheduler, kv = engine._scheduler, engine._kv
    residency, sequences = kv.residency, engine._sequences
    names = {sequence.chain: number for number, sequence in sequences.items()}
    pools = (kv.pools[0], kv.host_pools[0])
    waits = sorted(sequences, key=lambda n: sequences[n].chain.idle.since)
    head = scheduler.waiting.head()
    return (
        tuple(_sequence(sequences[number]) for number in sorted(sequences)),
        tuple(waits),
        tuple(_turn(turn) for turn in (*scheduler.running, *scheduler.waiting)),
        _rows(engine._flight),
        tuple(_slots(pool) for pool in pools),
        tuple((c.kind, _content(c.source), c.tokens, c.sent) for c in kv.copies._open.values()),
        tuple(
            tuple(names[chain] for chain in chains)
            for chains in (residency._unsaved, residency._leaving, residency._promoted)
        ),
        residency._rounds,
        scheduler._refused == (head, kv.releases),
    )


def _sequence(sequence) -> tuple:
    part, idle = sequence.chain.groups[0], sequence.chain.idle
    blocks = tuple((b.indexed, DEVICE in b.copies, HOST in b.copies) for b in part.blocks)
    tails = tuple((t.valid_tokens, DEVICE in t.copies, HOST in t.copies) for t in part.tails)
    flags = (part.straight, part.branch is not None, idle.clean, idle.kv, idle.promoted)
    return (sequence.id, bytes(sequence.log), sequence.chain.length, blocks, tails, flags)


def _turn(turn) -> tuple:
    command = turn.command
    left = command.max_tokens - turn.generated
    return (turn.sequence.id, turn.running, turn.restoring, left, command.background)


def _rows(flight) -> tuple:
    if flight is None:
        return ()
    rows = zip(flight.batch.plan.rows, flight.batch.turns, strict=True)
    return tuple((t.sequence.id, t.running, row.start, row.count, row.sample) for row, t in rows)


def _slots(pool) -> tuple:
    used = [slot for slot in pool._slots if slot.holder is not None]
    used.sort(key=lambda slot: (slot.last_used, _content(slot)))
    return tuple((_content(s), s.locks, s.tokens, s.arriving, s.doomed) for s in used)


def _content(slot) -> tuple:
    runs, holder = [], slot.holder
    while holder is not None:
        runs.append(getattr(holder, "tokens", b"") or bytes([holder.valid_tokens]))
        holder = holder.parent
    return tuple(runs)


def overload(seed: int) -> int:
    """Give random turns to a pool that is too small for them; return how many. All must end."""
    rng = random.Random(seed)
    blocks, size = rng.randint(2, 10), rng.choice((1, 2, 4))
    driver = Driver(
        num_blocks=blocks,
        block_size=size,
        host_blocks=rng.choice((0, 1, blocks, 40)),
        max_slots=rng.randint(1, 6),
        depth=seed % 2,
        settings=EngineSettings(
            token_budget=rng.randint(1, 16), check_invariants=True, kv_policy=rng.choice(KINDS)
        ),
    )
    logs: dict[int, list[int]] = {}  # of idle sequences
    wanted: dict[int, tuple[int, list[int]]] = {}
    for _ in range(rng.randint(2, 16)):
        number = rng.randrange(12)
        log = logs.pop(number, None)
        if log is not None and len(log) + 4 < blocks * size:
            new = rng.choices(range(2), k=rng.randint(1, 3))
            turn = driver.submit(number, new, keep=len(log), max_tokens=rng.randint(1, 20))
            wanted[turn] = number, [*log, *new]
        elif number not in [n for t, (n, _) in wanted.items() if t not in driver.finished]:
            prompt = rng.choices(range(2), k=rng.randint(1, blocks * size - 1))
            turn = driver.submit(number, prompt, max_tokens=rng.randint(1, 20))
            wanted[turn] = number, prompt
        for _ in range(rng.randint(0, 6)):
            driver.step()
        for turn in driver.finished:
            number, prompt = wanted[turn]
            if turn == max(t for t, (n, _) in wanted.items() if n == number):
                logs[number] = [*prompt, *driver.output[turn]]
    driver.drain(limit=5000)
    assert not driver.refused
    assert set(driver.finished) == set(wanted)
    for turn, (_, prompt) in wanted.items():
        assert driver.output[turn] == alone(prompt, len(driver.output[turn]))
    return len(wanted)
