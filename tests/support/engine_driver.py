"""An engine on the hash oracle, driven command by command."""

from collections import defaultdict

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import Finished, Refused, Started, Submit, Tokens
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
    """An oracle that keeps the plans it was given."""

    def __init__(self, **options):
        super().__init__(**options)
        self.plans: list[StepPlan] = []

    def launch(self, plan):
        self.plans.append(plan)
        return super().launch(plan)


class Driver:
    """Submits with fewer words, and sorts events by turn."""

    def __init__(
        self, *, settings=None, grammars=None, digest=None, runner=RecordingRunner, **options
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
        self.engine = Engine(self.runner, self.clock, self.settings, grammars, kv)
        self.turn = 0
        self.events = []
        self.output: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.started: dict[int, Started] = {}
        self.refused: dict[int, Refused] = {}

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

    def step(self):
        self.clock.advance(0.01)
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
        self.events.extend(events)
        return events

    def drain(self, limit=20_000):
        for _ in range(limit):
            if not self.engine.busy:
                return
            assert self.step(), "INV-06: turns are open and nothing happens"
        raise AssertionError(f"still busy after {limit} steps")

    def run(self, sequence, tokens, **options):
        """Submit, run to the end, and return the turn's number."""
        turn = self.submit(sequence, tokens, **options)
        self.drain()
        return turn
