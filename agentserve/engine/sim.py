"""Seeded simulation of the whole engine: `python -m agentserve.engine.sim --seeds N [--start S]`.

Each seed makes a small world (tiers, policy, context, budget), then random sessions that share
prompts, cut, fork, cancel and close at any step, wait, are announced and come back, with bad
commands and failing rows among them. Grammars take time to compile, fail, or never end. The runners
of odd seeds have depth 1. Copies between the tiers end late and out of order, their completions get
lost or come twice, and host copies vanish. The referee judges every event, and invariants are
checked after each step. A failing seed is printed with the command that replays it.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import msgspec

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import Cancel, Close, Fork, Hint, Inspect, Promote, Submit
from agentserve.engine.oracle import OracleRunner
from agentserve.engine.plan import SamplingParams, pack
from agentserve.engine.referee import Referee, Reference, SimulationError, expect
from agentserve.engine.simworld import FaultyRunner, ToyCompiler, ToyGrammar, World
from agentserve.kv.chains import KvCache, KvShape
from agentserve.kv.policy import make_policy

INJECTED = {
    "refusals": " (expected: of bad commands that were injected, and of what cannot fit)",
    "ended by error": " (expected: of rows and grammars whose failure was injected)",
}
CHUNK = 50  # seeds that a process runs before it reports
STUCK = 5_000  # steps to drain a small world; many times what any seed needs


class Simulation:
    """One seed's world, driven by `run`. Subclasses have another runner."""

    command = "python -m agentserve.engine.sim"
    compiles = True  # False: grammars are there from the start

    def __init__(self, seed: int, depth: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.more = random.Random(-1 - seed)
        self.asking = random.Random(f"log probabilities {seed}")
        self.world = World.draw(self.rng, self.more, seed % 2 if depth is None else depth)
        self.runner = self.make_runner(random.Random(self.rng.random()))
        self.clock = VirtualClock()
        settings = EngineSettings(
            token_budget=self.world.token_budget,
            max_waiting=self.world.max_waiting,
            grammar_s=self.world.grammar_s,
            grammar_cache_bytes=self.world.grammar_cache,
            check_invariants=True,
        )
        shape = KvShape(
            identity=self.runner.info.identity,
            num_blocks=self.world.num_blocks,
            block_size=self.world.block_size,
            host_blocks=self.world.host_blocks,
        )
        self.kv = KvCache(shape, make_policy(self.world.policy))
        self.compiler = ToyCompiler(self.world.vocab_size, self.clock, self.more)
        self.engine = Engine(self.runner, self.clock, settings, self.compiler, self.kv)
        if not self.compiles:
            self.engine.grammars.keep("even", ToyGrammar(self.world.vocab_size, None, 1))
            self.engine.grammars.keep("breaks:2", ToyGrammar(self.world.vocab_size, 2, 1))
        self.referee = Referee(self.world)
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
        for sequence in list(self.referee.sessions):
            self.engine.apply(Close(sequence))
        self._drain()
        stats = self.engine.stats()
        expect(not self.referee.open, "INV-08: turns did not end")
        expect(stats.blocks_locked == 0, "INV-07: blocks are locked when nothing runs")
        expect(stats.running == stats.waiting == 0, "INV-07: turns are left")
        expect(stats.compiling == 0, "INV-08: turns wait for grammars that nobody compiles")
        self._judge_compiling()
        expect(stats.host_locked == stats.copies_in_flight == 0, "INV-07: copies are left")
        for pool in (*self.kv.pools, *self.kv.host_pools):
            while pool.evict_unowned():
                pass
            expect(pool.free == pool.total, f"INV-07: {pool.tier} slots are left for nobody")
        self.referee.counts.update(
            {
                "evictions": stats.evictions,
                "preemptions": stats.preemptions,
                "host evictions": stats.host_evictions,
                "stale completions": stats.stale_completions,
                "discarded tokens": stats.discarded_tokens,
                "grammars compiled": stats.grammars_compiled,
                "grammars refused": stats.grammars_refused,
                "compilers ended": stats.compilers_ended,
            }
        )
        self.referee.counts.update(
            {f"lost: {reason}": count for reason, count in stats.lost.items()}
        )
        block_bytes = self.runner.info.groups[0].block_bytes
        self.referee.counts["saves"] += stats.saved_bytes // block_bytes
        self.referee.counts["loads"] += stats.loaded_bytes // block_bytes

    def _judge_compiling(self) -> None:
        """Verify that nothing was compiled twice that could be kept."""
        if self.world.grammar_s > ToyCompiler.LONGEST_S and self.world.grammar_cache == 1000:
            kinds = ("even", "breaks")
            often = {s: n for s, n in self.compiler.begun.items() if n > 1 and s.startswith(kinds)}
            expect(not often, f"compiled more than once: {often}")

    # Actions

    def _submit(self) -> None:
        session = self._pick()
        if session is None or (
            len(self.referee.sessions) < self.world.sessions and self.rng.random() < 0.3
        ):
            session = self._new()
        elif self.rng.random() < 0.4:  # while its KV is still being saved
            session = self.referee.sessions.get(self.referee.ended, session)
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
            sampling=SamplingParams(logprobs=self.asking.choice((None, None, None, 0, 3))),
            stop_ids=self.rng.sample(range(self.world.vocab_size), self.rng.randint(0, 1)),
            grammar=self._grammar(self.rng.choice((None, None, None, "even", "breaks:2"))),
            force=pack(self._tokens(0, 5)) if self.rng.random() < 0.3 else b"",
            background=max_tokens == 0 and self.rng.random() < 0.7,
        )
        self._send(session, command, session.tokens[:keep] + new)

    def _grammar(self, usual: str | None) -> str | None:
        if usual is None or not self.compiles:
            return usual
        kinds = (usual, usual, usual, usual, usual, usual, "hang", "die", "bad")
        return f"{self.more.choice(kinds)}/{self.more.randrange(3)}"

    def _send(self, session: Reference, command: Submit, tokens: list[int]) -> None:
        code = self._refusal(len(tokens))
        self.engine.apply(command)
        if code:
            self._refused(command.turn, command.sequence, code)
            return
        self.referee.sessions[session.sequence] = session
        session.before = session.tokens, session.generation
        session.tokens, session.turn = tokens, command
        session.generation = command.generation
        session.opened = session.opened or command.turn in self.engine.turns
        session.generated, session.cancelled = 0, False
        self.referee.open[command.turn] = session

    def step(self) -> None:
        """Let the engine run a step, and hold its events against the reference."""
        self.clock.advance(self.rng.random() * self.world.tick)
        compiling = self.engine.stats().compiling
        self.referee.counts["turns that wait for grammars"] += compiling
        issued, busy = self.engine.steps, len(self.referee.open) > compiling
        events = self.engine.step()
        self.referee.counts["steps"] += 1
        happened = bool(events) or self.engine.steps > issued
        expect(happened or not busy, "INV-06: turns are open and nothing happens")
        for event in events:
            self.referee.see(event)
        expect(not self.referee.expected, f"no refusal came for {self.referee.expected}")

    def _fork(self) -> None:
        source = self._pick()
        if source is None or not source.opened or self._is_held(source):
            return
        keep = self.rng.randint(0, len(source.tokens))
        copy = Reference(self._number(), 1, source.namespace, source.tokens[:keep])
        self.engine.apply(
            Fork(source.sequence, source.generation, copy.sequence, copy.generation, keep)
        )
        self.referee.sessions[copy.sequence] = copy
        self.referee.counts["forks"] += 1

    def _close(self) -> None:
        session = self._pick()
        if session is not None:
            self._note_cancel(session)
            self.engine.apply(Close(session.sequence))
            del self.referee.sessions[session.sequence]

    def _cancel(self) -> None:
        turn = self.rng.choice([*self.referee.open, -1])
        if turn >= 0:
            self._note_cancel(self.referee.open[turn])
        self.engine.apply(Cancel(turn))

    def _note_cancel(self, session: Reference) -> None:
        session.cancelled = True
        if session.turn is not None and session.turn.turn in self.engine.grammars:
            session.held = True

    def _hint(self) -> None:
        tools = self.rng.sample(("grep", "shell:make", "ask"), self.rng.randint(0, 2))
        expected = self.rng.choice((None, 0.0, 1.0, 1e9))
        kv = self.rng.choice(("auto", "auto", "device", "host", "drop"))
        self.engine.apply(Hint(self.rng.randint(0, self._next), tools, expected, kv))

    def _promote(self) -> None:
        begin = self.rng.random() < 0.8
        self.engine.apply(Promote(self.rng.randint(0, self._next), begin=begin))

    def _inspect(self) -> None:
        self.engine.apply(Inspect(7, [*self.referee.sessions, -1]))

    def _lose_host_copy(self) -> None:
        self.referee.counts["host copies lost"] += self.kv.residency.drop_host(self.rng.choice)

    def _bad_command(self) -> None:
        session = self._pick()
        if session is None or self._is_held(session):
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
        if session.opened:
            self.engine.apply(Fork(session.sequence, session.generation, session.sequence, 9, 0))
            self._refused(-1, session.sequence, "invalid")

    def _refused_submit(self, command: Submit, code: str) -> None:
        self.engine.apply(command)
        self._refused(command.turn, command.sequence, code)

    def _refused(self, turn: int, sequence: int, code: str) -> None:
        self.referee.expected.append((turn, sequence, code))
        self.referee.counts["refusals"] += 1

    # Choices

    def _refusal(self, length: int) -> str:
        if length + 1 > self.world.max_context:
            return "context_full"
        if -(-(length + 1) // self.world.block_size) > self.world.num_blocks:
            return "exceeds_kv_capacity"
        now = self.engine.stats()
        if now.waiting + now.compiling >= self.world.max_waiting:
            return "overloaded"
        return ""

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
        return (
            self.rng.choice(list(self.referee.sessions.values())) if self.referee.sessions else None
        )

    def _is_held(self, session: Reference) -> bool:
        """Whether the engine's log is not yet, or no more, what the open turn makes of it."""
        return session.turn is not None and session.turn.turn not in self.engine.turns

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _drain(self) -> None:
        for _ in range(STUCK):
            if not self.engine.busy:
                if not self.engine.stats().compiling:
                    return
                self.clock.advance(self.engine.wake_in())
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
        total.update(simulation.referee.counts)
        total["seeds"] += 1
    return total


def run_parallel(
    start: int, count: int, make: type[Simulation] = Simulation, jobs: int = 1
) -> "Counter[str]":
    """Run seeds in `jobs` processes; otherwise like `run_seeds`."""
    if jobs == 1:
        return run_seeds(start, count, make)
    starts = range(start, start + count, CHUNK)
    sizes = [min(CHUNK, start + count - first) for first in starts]
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for counts in pool.map(partial(run_seeds, make=make), starts, sizes):
                total.update(counts)
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
    return total


def main(arguments: list[str] | None = None, make: type[Simulation] = Simulation) -> None:
    """Run the seeds named on the command line and print the counts."""
    parser = argparse.ArgumentParser(description="Seeded simulation of the engine")
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--start", type=int, default=0, help="the first (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options = parser.parse_args(arguments)
    total = run_parallel(options.start, options.seeds, make, options.jobs)
    for name in sorted(total, key=lambda name: (name != "seeds", name)):
        sys.stdout.write(f"{name}: {total[name]}{INJECTED.get(name, '')}\n")
    verdict = "every token right, no invariant broken, nothing left locked"
    sys.stdout.write(f"{total['seeds']} seeds: {verdict}\n")


if __name__ == "__main__":
    main()
