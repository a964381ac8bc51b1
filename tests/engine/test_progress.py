"""INV-06: whatever arrives in whatever order, some step runs or some turn ends."""

import copy
import random
from collections import deque

from counts import COUNTS
from engine_driver import Driver, alone

from agentserve.config import EngineSettings
from agentserve.engine.messages import Cancel

PROMPTS = {1: [1, 2, 3], 2: [1, 2, 9, 8]}
DEPTH = 8


def world() -> Driver:
    return Driver(num_blocks=4, block_size=2, max_context=32, max_slots=2)


def key(driver: Driver):
    """The state that decides what can happen next: turns, logs, and what each block holds."""
    engine = driver.engine
    scheduler = engine._scheduler
    pool = engine._kv.pools[0]

    def content(holder):
        above = content(holder.parent) if holder.parent is not None else ()
        return (*above, getattr(holder, "tokens", None) or getattr(holder, "valid_tokens", 0))

    order = sorted(pool._slots, key=lambda slot: slot.last_used)
    return (
        tuple((s, q.log.tobytes(), q.chain.length) for s, q in sorted(engine._sequences.items())),
        tuple(t.sequence.id for t in scheduler.running),
        tuple(t.sequence.id for t in scheduler.waiting),
        tuple((s.locks, content(s.holder)) for s in order if s.holder is not None),
    )


def moves(driver: Driver) -> list[str]:
    turns = [q.turn for q in driver.engine._sequences.values() if q.turn is not None]
    busy = {turn.sequence.id for turn in turns}
    submits = [f"submit {s}" for s in PROMPTS if s not in busy]
    submits += [f"append {s}" for s in driver.engine._sequences if s not in busy]
    return submits + [f"cancel {t.id}" for t in turns] + (["step"] if driver.engine.busy else [])


def apply(driver: Driver, move: str) -> None:
    name, _, number = move.partition(" ")
    if name == "submit":
        driver.submit(int(number), PROMPTS[int(number)], max_tokens=4)
    elif name == "append":
        log = driver.engine._sequences[int(number)].log
        driver.submit(int(number), [5], keep=len(log), max_tokens=2)
    elif name == "cancel":
        driver.engine.apply(Cancel(int(number)))
    else:
        assert driver.step(), "INV-06: turns are open and nothing happens"


def test_every_order_of_two_sessions_on_four_blocks_makes_progress():
    first = world()
    seen = {key(first)}
    queue = deque([(first, 0)])
    while queue:
        driver, depth = queue.popleft()
        finishing = copy.deepcopy(driver)
        finishing.drain(limit=60)
        assert finishing.engine.stats().blocks_locked == 0
        if depth == DEPTH:
            continue
        for move in moves(driver):
            after = copy.deepcopy(driver)
            apply(after, move)
            if (state := key(after)) not in seen:
                seen.add(state)
                queue.append((after, depth + 1))
    COUNTS["small-scope states"] += len(seen)
    assert len(seen) > 100


def test_random_overloads_always_finish_and_give_the_right_tokens():
    for seed in range(150):
        rng = random.Random(seed)
        blocks = rng.randint(2, 10)
        size = rng.choice((1, 2, 4))
        d = Driver(
            num_blocks=blocks,
            block_size=size,
            max_slots=rng.randint(1, 6),
            settings=EngineSettings(token_budget=rng.randint(1, 16), check_invariants=True),
        )
        wanted = {}
        for sequence in range(rng.randint(2, 12)):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, blocks * size - 1))]
            turn = d.submit(sequence, prompt, max_tokens=rng.randint(1, 20))
            wanted[turn] = prompt
            for _ in range(rng.randint(0, 3)):
                d.step()
        d.drain(limit=5000)
        assert set(d.finished) == set(wanted)
        for turn, prompt in wanted.items():
            assert d.output[turn] == alone(prompt, len(d.output[turn]))
        COUNTS["random overloads"] += 1
