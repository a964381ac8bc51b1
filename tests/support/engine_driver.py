"""An engine on the hash oracle, driven command by command."""

from collections import defaultdict
from collections.abc import Callable

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import (
    Cancel,
    Finished,
    Hint,
    Inspect,
    Inspected,
    Promote,
    Refused,
    Residency,
    Started,
    Submit,
    Tokens,
)
from agentserve.engine.oracle import OracleRunner, oracle_next
from agentserve.engine.plan import StepPlan, pack
from agentserve.kv.chains import KvCache, KvShape

VOCAB = 256


def alone(tokens, count: int) -> list[int]:
    """The tokens that the oracle gives after `tokens` when nothing else runs."""
    log = list(tokens)
    for _ in range(count):
        log.append(oracle_next(log, VOCAB))
    return log[len(tokens) :]


class RecordingRunner(OracleRunner):
    """An oracle that keeps the plans it was given, and whose copies can be held back.

    Copies between tiers of the kinds in `held` do not end. Those of the kinds in `unreported` end
    and nobody hears of it, until they are asked for as overdue.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.plans: list[StepPlan] = []
        self.held: set[str] = set()
        self.unreported: set[str] = set()
        self._ended: set[int] = set()

    def launch(self, plan):
        self.plans.append(plan)
        return super().launch(plan)

    def collect(self, handle):
        told = [t for t in handle.plan.overdue if t in self._ended]
        for copy in [copy for copy in self._flying if copy.kind not in self.held]:
            tickets = self.land([copy])
            if copy.kind in self.unreported:
                self._ended.update(tickets)
            else:
                told += tickets
        return self.result(handle, told)


class Driver:
    """Submits with fewer words, and sorts events by turn."""

    def __init__(
        self, *, settings=None, compiler=None, digest=None, runner=RecordingRunner, **options
    ):
        self.runner = runner(vocab_size=VOCAB, **options)
        self.clock = VirtualClock()
        self.settings = settings or EngineSettings(check_invariants=True)
        info = self.runner.info
        kv = (
            KvCache(KvShape(info.identity, info.num_blocks, info.block_size), digest=digest)
            if digest
            else None
        )
        self.engine = Engine(self.runner, self.clock, self.settings, compiler, kv)
        self.turn = 0
        self.events = []
        self.output: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.started: dict[int, Started] = {}
        self.refused: dict[int, Refused] = {}
        self._where: list[Residency] = []

    def submit(self, sequence, tokens, *, keep=0, max_tokens=4, stop_ids=(), force=(), **more):
        self.turn += 1
        more.setdefault("generation", 1)
        more.setdefault("namespace", "a")
        self.engine.apply(
            Submit(
                turn=self.turn,
                sequence=sequence,
                keep=keep,
                tokens=pack(tokens),
                max_tokens=max_tokens,
                stop_ids=list(stop_ids),
                force=pack(force),
                **more,
            )
        )
        return self.turn

    def step(self, seconds=0.01):
        self.clock.advance(seconds)
        events = self.engine.step()
        for event in events:
            if isinstance(event, Tokens):
                self.output[event.turn].extend(event.tokens)
            elif isinstance(event, Finished):
                assert event.turn not in self.finished
                self.finished[event.turn] = event
            elif isinstance(event, Started):
                assert event.turn not in self.started
                self.started[event.turn] = event
            elif isinstance(event, Refused):
                self.refused[event.turn] = event
            elif isinstance(event, Inspected):
                self._where = event.sequences
        self.events.extend(events)
        return events

    def advance(self, seconds=0.01):
        """Step; with a turn open or a copy in flight something has to happen (INV-06)."""
        before = self.engine.stats()
        open_turns = before.running + before.waiting
        happened = bool(self.step(seconds)) or self.engine.stats().step > before.step
        assert happened or not open_turns, "INV-06: turns are open and nothing happens"

    def drain(self, limit=20_000):
        self.step_until(lambda: not self.engine.busy, limit)

    def step_until(self, reached: Callable[[], bool], limit=20_000, seconds=0.01):
        for _ in range(limit):
            if reached():
                return
            self.advance(seconds)
        raise AssertionError(f"not there after {limit} steps")

    def cancel(self, turn):
        self.engine.apply(Cancel(turn))

    def run(self, sequence, tokens, **options):
        """Submit, run to the end, and return the turn's number."""
        turn = self.submit(sequence, tokens, **options)
        self.drain()
        return turn

    def finish(self, *turns, limit=20_000):
        """Step until these turns are over, whatever else goes on."""
        self.step_until(lambda: set(turns) <= self.finished.keys(), limit)

    def hint(self, sequence, kv="auto", tools=(), expected_s=None):
        self.engine.apply(Hint(sequence, list(tools), expected_s, kv))

    def offload(self, sequence):
        """Take the sequence's KV off the device."""
        self.hint(sequence, "host")
        self.drain()

    def promote(self, sequence, *, begin=True):
        self.engine.apply(Promote(sequence, begin))

    def inspect(self, *sequences) -> list[Residency]:
        """Return where these sequences are; takes a step."""
        self.engine.apply(Inspect(1, list(sequences)))
        self.step()
        return self._where

    def where(self, sequence) -> tuple[int, int]:
        """Return the tokens of one sequence on the device and in the host tier."""
        (found,) = self.inspect(sequence)
        return found.device, found.host
