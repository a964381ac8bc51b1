"""Seeded simulation of the whole engine: `python -m agentserve.engine.sim --seeds N [--start S]`.

Each seed makes a small world (tiers, policy, context, budget), then random sessions that share
prompts, cut, fork, cancel and close at any step, wait, are announced and come back, with bad
commands and failing rows among them. Copies between the tiers end late and out of order, their
completions get lost or come twice, and host copies vanish. Every
session has a reference, its token list; every token of every turn must be the one that
`oracle_next` gives for that list alone, whatever else runs. Invariants are checked after each step.
A failing seed is printed with the command that replays it.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import (
    Cancel,
    Close,
    Event,
    Finished,
    Fork,
    Hint,
    Inspect,
    Inspected,
    Progress,
    Promote,
    Refused,
    Started,
    Stats,
    Submit,
    Tokens,
)
from agentserve.engine.oracle import OracleRunner, oracle_next
from agentserve.engine.plan import pack
from agentserve.engine.simworld import Computed, FaultyRunner, Grammars, World
from agentserve.kv.chains import KvCache, KvShape
from agentserve.kv.policy import make_policy

INJECTED = {
    "refusals": " (expected: of bad commands that were injected, and of what cannot fit)",
    "ended by error": " (expected: of rows and grammars whose failure was injected)",
}
STUCK = 5_000  # steps to drain a small world; many times what any seed needs


class SimulationError(Exception):
    """The engine did what the reference does not allow."""


def expect(condition: bool, message: str) -> None:
    """Raise SimulationError with `message` unless `condition` holds."""
    if not condition:
        raise SimulationError(message)


@dataclass(slots=True)
class Reference:
    """What a session's tokens must be, and the turn that is open on it."""

    sequence: int
    generation: int
    namespace: str
    tokens: list[int] = field(default_factory=list)
    turn: Submit | None = None
    generated: int = 0
    cancelled: bool = False


class Simulation:
    """One seed's world, driven by `run`. Subclasses have another runner."""

    command = "python -m agentserve.engine.sim"

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World.draw(self.rng)
        self.runner = self.make_runner(random.Random(self.rng.random()))
        self.clock = VirtualClock()
        settings = EngineSettings(
            token_budget=self.world.token_budget,
            max_waiting=self.world.max_waiting,
            check_invariants=True,
        )
        shape = KvShape(
            identity=self.runner.info.identity,
            num_blocks=self.world.num_blocks,
            block_size=self.world.block_size,
            host_blocks=self.world.host_blocks,
        )
        self.kv = KvCache(shape, make_policy(self.world.policy))
        grammars = Grammars(self.world.vocab_size)
        self.engine = Engine(self.runner, self.clock, settings, grammars, self.kv)
        self.counts: Counter[str] = Counter()
        self._sessions: dict[int, Reference] = {}
        self._open: dict[int, Reference] = {}
        self._ended = -1  # the sequence whose turn ended last
        self._computed = Computed()
        self._expected: list[tuple[int, int, str]] = []  # turn, sequence, code of each refusal
        self._next = 0
        self._prompts = [self._tokens(1, self.world.longest_prompt) for _ in range(3)]
        self._actions: list[tuple[int, Callable[[], None]]] = [
            (14, self._submit),
            (24, self.step),
            (2, self._fork),
            (1, self._close),
            (2, self._cancel),
            (2, self._bad_command),
            (3, self._hint),
            (3, self._promote),
            (1, self._inspect),
            (1, self._lose_host_copy),
        ]

    def make_runner(self, rng: random.Random) -> OracleRunner:
        """Return what executes the plans of this world."""
        return FaultyRunner(self.world, rng)

    def run(self) -> None:
        """Act, drain, close, and verify that nothing is left. Raises SimulationError."""
        weights = [weight for weight, _ in self._actions]
        for _ in range(self.world.actions):
            (choice,) = self.rng.choices(self._actions, weights)
            choice[1]()
        self._drain()
        for sequence in list(self._sessions):
            self.engine.apply(Close(sequence))
        self._drain()
        stats = self.engine.stats()
        expect(not self._open, "INV-08: turns did not end")
        expect(stats.blocks_locked == 0, "INV-07: blocks are locked when nothing runs")
        expect(stats.running == stats.waiting == 0, "INV-07: turns are left")
        expect(stats.host_locked == stats.copies_in_flight == 0, "INV-07: copies are left")
        self.counts.update(
            {
                "evictions": stats.evictions,
                "preemptions": stats.preemptions,
                "host evictions": stats.host_evictions,
                "stale completions": stats.stale_completions,
            }
        )
        self.counts.update({f"lost: {reason}": count for reason, count in stats.lost.items()})
        block_bytes = self.runner.info.groups[0].block_bytes
        self.counts["saves"] += stats.saved_bytes // block_bytes
        self.counts["loads"] += stats.loaded_bytes // block_bytes

    # Actions

    def _submit(self) -> None:
        session = self._pick()
        if session is None or (
            len(self._sessions) < self.world.sessions and self.rng.random() < 0.3
        ):
            session = self._new()
        elif self.rng.random() < 0.4:  # while its KV is still being saved
            session = self._sessions.get(self._ended, session)
        if session.turn is not None:
            return
        keep = self._keep(session)
        new = self._new_tokens(keep)
        anew = self.rng.randint(0, 1) if keep == 0 else 0
        lengths = (0, 1, 2, 3, 5) if self.world.steady else (0, 1, 3, 10, 20, 60)
        max_tokens = self.rng.choice(lengths)
        command = Submit(
            turn=self._number(),
            sequence=session.sequence,
            generation=session.generation + anew,
            keep=keep,
            tokens=pack(new),
            namespace=session.namespace,
            max_tokens=max_tokens,
            stop_ids=self.rng.sample(range(self.world.vocab_size), self.rng.randint(0, 1)),
            grammar=self.rng.choice((None, None, None, "even", "breaks:2")),
            force=pack(self._tokens(0, 5)) if self.rng.random() < 0.3 else b"",
            background=max_tokens == 0 and self.rng.random() < 0.7,
        )
        self._send(session, command, session.tokens[:keep] + new)

    def _send(self, session: Reference, command: Submit, tokens: list[int]) -> None:
        code = self._refusal(len(tokens))
        self.engine.apply(command)
        if code:
            self._refused(command.turn, command.sequence, code)
            return
        self._sessions[session.sequence] = session
        session.tokens, session.turn = tokens, command
        session.generation = command.generation
        session.generated, session.cancelled = 0, False
        self._open[command.turn] = session

    def step(self) -> None:
        """Let the engine run a step, and hold its events against the reference."""
        self.clock.advance(self.rng.random() * self.world.tick)
        issued, busy = self.engine.stats().step, bool(self._open)
        events = self.engine.step()
        self.counts["steps"] += 1
        happened = bool(events) or self.engine.stats().step > issued
        expect(happened or not busy, "INV-06: turns are open and nothing happens")
        for event in events:
            self._see(event)
        expect(not self._expected, f"no refusal came for {self._expected}")

    def _fork(self) -> None:
        source = self._pick()
        if source is None:
            return
        keep = self.rng.randint(0, len(source.tokens))
        copy = Reference(self._number(), 1, source.namespace, source.tokens[:keep])
        self.engine.apply(
            Fork(source.sequence, source.generation, copy.sequence, copy.generation, keep)
        )
        self._sessions[copy.sequence] = copy
        self.counts["forks"] += 1

    def _close(self) -> None:
        session = self._pick()
        if session is not None:
            session.cancelled = True
            self.engine.apply(Close(session.sequence))
            del self._sessions[session.sequence]

    def _cancel(self) -> None:
        turn = self.rng.choice([*self._open, -1])
        if turn >= 0:
            self._open[turn].cancelled = True
        self.engine.apply(Cancel(turn))

    def _hint(self) -> None:
        tools = self.rng.sample(("grep", "shell:make", "ask"), self.rng.randint(0, 2))
        expected = self.rng.choice((None, 0.0, 1.0, 1e9))
        kv = self.rng.choice(("auto", "auto", "device", "host", "drop"))
        self.engine.apply(Hint(self.rng.randint(0, self._next), tools, expected, kv))

    def _promote(self) -> None:
        begin = self.rng.random() < 0.8
        self.engine.apply(Promote(self.rng.randint(0, self._next), begin=begin))

    def _inspect(self) -> None:
        self.engine.apply(Inspect(7, [*self._sessions, -1]))

    def _lose_host_copy(self) -> None:
        self.counts["host copies lost"] += self.kv.residency.drop_host(self.rng.choice)

    def _bad_command(self) -> None:
        session = self._pick()
        if session is None:
            return
        good = Submit(
            self._number(), session.sequence, session.generation, 0, pack([0]), "a", 1, []
        )
        change = msgspec.structs.replace
        if session.turn is not None:
            if not session.cancelled:  # else it is over, and its last event is on the way
                self._refused_submit(good, "busy")
            return
        keep = len(session.tokens)
        stranger = change(good, namespace=session.namespace, keep=keep + 1)
        for bad, code in (
            (change(good, tokens=b"\0\0\0"), "invalid"),
            (change(good, tokens=pack([self.world.vocab_size])), "invalid"),
            (change(good, force=pack([-1])), "invalid"),
            (change(good, tokens=b""), "invalid"),
            (change(good, max_tokens=-1), "invalid"),
            (change(good, keep=-1), "invalid"),
            (stranger, "unknown_sequence"),
            (change(stranger, keep=1, generation=-1), "unknown_sequence"),
            (change(stranger, sequence=-5, keep=1), "unknown_sequence"),
            (change(good, tokens=pack([0] * self.world.max_context)), "context_full"),
        ):
            self._refused_submit(bad, code)
        self.engine.apply(Fork(-5, 1, -6, 1, 0))
        self._refused(-1, -6, "unknown_sequence")
        self.engine.apply(Fork(session.sequence, session.generation, session.sequence, 9, 0))
        self._refused(-1, session.sequence, "invalid")
        if not self._refusal(1):
            self._refused_submit(change(good, grammar="nonsense"), "bad_grammar")

    def _refused_submit(self, command: Submit, code: str) -> None:
        self.engine.apply(command)
        self._refused(command.turn, command.sequence, code)

    def _refused(self, turn: int, sequence: int, code: str) -> None:
        self._expected.append((turn, sequence, code))
        self.counts["refusals"] += 1

    # Events against the reference

    def _see(self, event: Event) -> None:
        if isinstance(event, Refused):
            expect(bool(self._expected), f"an unexpected refusal: {event}")
            expected = self._expected.pop(0)
            expect((event.turn, event.sequence, event.code) == expected, f"{event}: {expected}")
        elif isinstance(event, Tokens):
            self._see_tokens(event)
        elif isinstance(event, Finished):
            self._see_finished(event)
        elif isinstance(event, Started):
            session = self._session(event.turn)
            total = len(session.tokens)
            others = (other for other in self._open.values() if other is not session)
            self._computed.update((other.namespace, other.tokens) for other in others)
            reused = session.tokens[: event.cached]
            expect(
                self._computed.has(session.namespace, reused),
                f"INV-04: {event}: nobody in this namespace has computed that prefix",
            )
            expect(event.cached + event.computed == total, f"{event} for {total} tokens")
            expect(event.computed >= 1 and 0 <= event.host <= event.cached, str(event))
            expect(event.lost < event.computed, str(event))
            self.counts.update(cached=event.cached, computed=event.computed)
            self.counts["from host"] += event.host
        elif isinstance(event, Progress):
            self._session(event.turn)
            expect(0 < event.done <= event.total, str(event))
        elif isinstance(event, Inspected):
            for each in event.sequences:
                expect(max(each.device, each.host) <= each.tokens, str(each))
        else:
            expect(isinstance(event, Stats), f"an unexpected event: {event}")

    def _see_tokens(self, event: Tokens) -> None:
        session = self._session(event.turn)
        for token in event.tokens:
            expected = self._next_token(session)
            if token != expected:
                where = f"turn {event.turn}, token {len(session.tokens)}"
                raise SimulationError(f"{where}: {token} instead of {expected}")
            session.tokens.append(token)
            session.generated += 1

    def _see_finished(self, event: Finished) -> None:
        session = self._session(event.turn)
        command = session.turn
        del self._open[event.turn]
        session.turn = None
        self._ended = session.sequence
        self.counts["turns"] += 1
        self.counts[f"ended by {event.reason}"] += 1
        self._computed.update([(session.namespace, session.tokens)])
        length = len(session.tokens)
        expect(command is not None and event.log_length == length, f"{event}: {length} tokens")
        expect(event.kv_length <= event.log_length, str(event))
        if command is None:
            return
        allowed = {
            "stop": event.stop_id in command.stop_ids
            and not event.kv_length < length
            and event.stop_id == self._next_token(session, command),
            "length": session.generated == command.max_tokens > 0,
            "context": self._full(length),
            "prefilled": command.max_tokens == 0
            and (event.kv_length == length or command.background),
            "cancelled": session.cancelled,
            "error": "finite" in event.message or (command.grammar or "").startswith("breaks"),
        }
        expect(allowed.get(event.reason, False), f"wrong end: {event} of {command}")

    def _next_token(self, session: Reference, command: Submit | None = None) -> int:
        command = command or session.turn
        if command is None:
            raise SimulationError("tokens came without a turn")
        forced = len(command.force) // 4
        if session.generated < forced:
            start = 4 * session.generated
            return int.from_bytes(command.force[start : start + 4], "little")
        token = oracle_next(session.tokens, self.world.vocab_size)
        if command.grammar is not None and token % 2:
            token = (token + 1) % self.world.vocab_size
        return token

    def _session(self, turn: int) -> Reference:
        expect(turn in self._open, f"INV-08: an event for turn {turn}, which is not open")
        return self._open[turn]

    # Choices

    def _refusal(self, length: int) -> str:
        if length + 1 > self.world.max_context:
            return "context_full"
        if -(-(length + 1) // self.world.block_size) > self.world.num_blocks:
            return "exceeds_kv_capacity"
        if self.engine.stats().waiting >= self.world.max_waiting:
            return "overloaded"
        return ""

    def _full(self, length: int) -> bool:
        blocks = -(-length // self.world.block_size)
        return length >= self.world.max_context or blocks > self.world.num_blocks

    def _keep(self, session: Reference) -> int:
        length = len(session.tokens)
        if self.world.steady and self.rng.random() < 0.9:
            return length
        return self.rng.choice((length, length, length, self.rng.randint(0, length), 0))

    def _new_tokens(self, keep: int) -> list[int]:
        if keep == 0:
            return self.rng.choice(self._prompts) + self._tokens(0, 6)
        return self._tokens(0, 10)

    def _tokens(self, least: int, most: int) -> list[int]:
        count = self.rng.randint(least, most)
        return [self.rng.randrange(self.world.vocab_size) for _ in range(count)]

    def _new(self) -> Reference:
        return Reference(self._number(), 1, self.rng.choice("aab"))

    def _pick(self) -> Reference | None:
        return self.rng.choice(list(self._sessions.values())) if self._sessions else None

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _drain(self) -> None:
        for _ in range(STUCK):
            if not self.engine.busy:
                return
            self.step()
        raise SimulationError(f"INV-06: still busy after {STUCK} steps")


def run_seeds(start: int, count: int, make: type[Simulation] = Simulation) -> "Counter[str]":
    """Run seeds start..start+count-1 and return what happened in all of them.

    Raises what the first failing seed raises, with a note that says how to replay it.
    """
    total: Counter[str] = Counter()
    for seed in range(start, start + count):
        simulation = make(seed)
        try:
            simulation.run()
        except Exception as error:
            replay = f"{make.command} --start {seed} --seeds 1"
            error.add_note(f"seed {seed} failed in {simulation.world}; replay it with: {replay}")
            raise
        total.update(simulation.counts)
        total["seeds"] += 1
    return total


def main(arguments: list[str] | None = None, make: type[Simulation] = Simulation) -> None:
    """Run the seeds named on the command line and print the counts."""
    parser = argparse.ArgumentParser(description="Seeded simulation of the engine")
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--start", type=int, default=0, help="the first (default 0)")
    options = parser.parse_args(arguments)
    total = run_seeds(options.start, options.seeds, make)
    for name in sorted(total, key=lambda name: (name != "seeds", name)):
        sys.stdout.write(f"{name}: {total[name]}{INJECTED.get(name, '')}\n")
    verdict = "every token right, no invariant broken, nothing left locked"
    sys.stdout.write(f"{total['seeds']} seeds: {verdict}\n")


if __name__ == "__main__":
    main()
