"""What a simulation seed runs in: the sizes, a runner whose rows fail, a toy compiler."""

import random
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from agentserve.clock import Clock
from agentserve.engine.grammars import Answer
from agentserve.engine.oracle import OracleRunner, OracleStep
from agentserve.engine.plan import StepPlan, StepResult
from agentserve.engine.sequence import Matcher
from agentserve.kv.policy import POLICIES


class World(msgspec.Struct, frozen=True):
    """What a seed decides before anything runs."""

    steady: bool  # sessions come back soon, with all they had, for short turns
    block_size: int
    num_blocks: int
    host_blocks: int
    policy: str
    max_context: int
    max_slots: int
    vocab_size: int
    token_budget: int
    max_waiting: int
    sessions: int
    actions: int
    fault_rate: float
    copy_rate: float  # chance that a copy in flight ends with a step
    trouble_rate: float  # chance that its completion is lost, or comes twice
    tick: float  # seconds that pass between two steps, at most
    grammar_s: float  # a grammar may take so long
    grammar_cache: int  # bytes; toy grammars have 1 to 100
    depth: int  # of the runner

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that a session begins with."""
        capacity = self.block_size * self.num_blocks
        return max(1, capacity // 4) if self.steady else self.max_context // 2

    @classmethod
    def draw(cls, rng: random.Random, more: random.Random, depth: int) -> "World":
        """Return a random world, small enough that memory is always short.

        `more` decides about grammars, so that worlds of old seeds are what they were.
        """
        slots = rng.choice((1, 3, 4, 6, 8))
        steady = rng.random() < 0.5
        size = rng.choice((2, 3, 4, 8) if steady else (1, 2, 3, 4, 8))
        trouble = rng.choice((0.0, 0.0, 0.05))
        return cls(
            steady=steady,
            block_size=size,
            num_blocks=3 + rng.randint(24, 80) // size if steady else rng.randint(4, 20),
            host_blocks=rng.choice((0, rng.randint(1, 6), rng.randint(7, 60))),
            policy=rng.choice(POLICIES + POLICIES[2:]),
            max_context=rng.randint(24, 120),
            max_slots=slots,
            vocab_size=rng.choice((3, 16, 64)),
            token_budget=rng.randint(1, 24),
            max_waiting=rng.choice((2, 64)),
            sessions=rng.choice((1, 4, 6, 8, 10)),
            actions=rng.randint(40, 300),
            fault_rate=rng.choice((0.0, 0.0, 0.01)),
            copy_rate=rng.choice((1.0, 0.7, 0.2, 0.1)),
            trouble_rate=trouble,
            tick=1.0 if trouble else rng.choice((1.0, 0.01)),
            grammar_s=more.choice((0.6, 2.0)),
            grammar_cache=more.choice((50, 150, 1000)),
            depth=depth,
        )

    def oracle(self) -> dict[str, int]:
        """Return the sizes that an OracleRunner takes."""
        return {
            "vocab_size": self.vocab_size,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "max_context": self.max_context,
            "max_slots": self.max_slots,
            "host_blocks": self.host_blocks,
            "depth": self.depth,
        }


class FaultyRunner(OracleRunner):
    """An oracle with failing rows and with late copies.

    Rows fail at random: not finite, and what they wrote is garbage. Copies between tiers end at any
    later step, in any order; completions get lost or come twice. What a step does to rows and
    copies is decided when it is launched, as it may be collected when others own its blocks.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(**world.oracle())
        self._rng = rng
        self._world = world
        self._landed: set[int] = set()
        self._told: dict[int, list[int]] = {}  # step -> tickets that its result names

    def launch(self, plan: StepPlan) -> OracleStep:
        """Run the oracle's step, let copies end, and spoil what failing rows wrote."""
        step = super().launch(plan)
        self._told[plan.step] = self._tickets(plan)
        for row in plan.rows:
            good = self._rng.random() >= self._world.fault_rate
            if not good:
                self.write(row.slot, row.start, [-7] * row.count)
            step.finite.append(good)
        return step

    def collect(self, handle: OracleStep) -> StepResult:
        """Return the oracle's result."""
        return self.result(handle, self._told.pop(handle.plan.step))

    def _tickets(self, plan: StepPlan) -> list[int]:
        """Let some copies end and return what is reported: late, out of order, lost or repeated."""
        rng, world = self._rng, self._world
        done = [copy for copy in self._flying if rng.random() < world.copy_rate]
        rng.shuffle(done)
        tickets = self.land(done)
        self._landed.update(tickets)
        if world.trouble_rate:
            tickets = [ticket for ticket in tickets if rng.random() >= world.trouble_rate]
            if self._landed and rng.random() < world.trouble_rate:
                tickets.append(rng.choice(sorted(self._landed)))
        return tickets + [ticket for ticket in plan.overdue if ticket in self._landed]


class EvenTokens:
    """A grammar of even tokens; with `breaks_after` it fails once it saw that many."""

    def __init__(self, vocab_size: int, breaks_after: int | None) -> None:
        words = [0x55555555] * (-(-vocab_size // 32))
        self._mask = b"".join(word.to_bytes(4, "little") for word in words)
        self._left = breaks_after

    def prepare(self) -> None:
        """Do nothing."""

    def mask(self) -> bytes | None:
        """Return the mask of even tokens. Raises RuntimeError when it is time to break."""
        if self._left == 0:
            raise RuntimeError("this grammar breaks here")
        return self._mask

    @property
    def broken(self) -> bool:
        """Return whether it has failed."""
        return self._left == 0

    def accept(self, token: int) -> None:
        """Count a token."""
        if self._left is not None:
            self._left = max(0, self._left - 1)


class ToyGrammar:
    """A compiled grammar whose matchers are `EvenTokens`."""

    def __init__(self, vocab_size: int, breaks_after: int | None, size: int) -> None:
        self.size = size
        self._vocab_size = vocab_size
        self._breaks_after = breaks_after

    def matcher(self) -> Matcher:
        """Return a new matcher."""
        return EvenTokens(self._vocab_size, self._breaks_after)


class ToyCompiler:
    """Compiles "even" and "breaks:N"; what follows a "/" makes another spec of the same.

    "hang" is never done, "die" takes the compiler with it, anything else is a bad grammar. Without
    a clock an answer is there at the next poll; with one it comes within LONGEST_S, and a compiler
    takes START_S to come up.
    """

    LONGEST_S = 1.0
    START_S = 0.5

    def __init__(
        self, vocab_size: int, clock: Clock | None = None, rng: random.Random | None = None
    ) -> None:
        self.begun: Counter[str] = Counter()
        self.lives = 0
        self._vocab_size = vocab_size
        self._clock = clock
        self._rng = rng or random.Random(0)
        self._up_at = float("inf")
        self._running: tuple[float, Answer | None] | None = None  # when it is done, and with what
        self._late: list[Answer] = []  # of jobs that were ended

    @property
    def ready(self) -> bool:
        """Whether it is up."""
        return self._now() >= self._up_at

    def listen(self, wake: Callable[[], None]) -> None:
        """Do nothing: the simulation polls."""

    def begin(self, job: int, spec: str) -> None:
        """Decide when the job is done, and how it ends."""
        assert self._running is None, "two jobs at once"
        if self._up_at == float("inf"):
            self.lives += 1
            self._up_at = self._now() + (self.START_S if self._clock is not None else 0.0)
        self.begun[spec] += 1
        took = self._rng.choice((0.0, 0.1, self.LONGEST_S)) if self._clock is not None else 0.0
        kind = spec.partition("/")[0]
        answer = None if kind == "hang" else self._answer(job, kind, spec)
        self._running = max(self._now(), self._up_at) + took, answer

    def poll(self) -> list[Answer]:
        """Return what is done by now, and at times again what nobody waits for."""
        answers, self._late = self._late, []
        if self._running is not None and self._now() >= self._running[0]:
            answer = self._running[1]
            if answer is not None:
                answers.append(answer)
                self._running = None
                if "died" in answer.error:
                    self._up_at = float("inf")
        return answers

    def end(self) -> None:
        """Come down at once; what was done just before is still heard, too late."""
        if self._running is not None and self._running[1] is not None:
            self._late.append(self._running[1])
        self._running = None
        self._up_at = float("inf")

    def close(self) -> None:
        """Come down for good."""
        self.end()

    def _answer(self, job: int, kind: str, spec: str) -> Answer:
        name, _, count = kind.partition(":")
        if name == "die":
            return Answer(job, error="the compiler died of it")
        if name not in ("even", "breaks"):
            return Answer(job, error=f"unknown grammar {spec!r}")
        size = self._rng.randint(1, 100)
        breaks_after = int(count) if count else None
        return Answer(job, ToyGrammar(self._vocab_size, breaks_after, size))

    def _now(self) -> float:
        return self._clock.monotonic() if self._clock is not None else 0.0


class Computed:
    """The tokens that turns of each namespace have fed or generated, so far as it was told."""

    def __init__(self) -> None:
        self._logs: dict[str, set[tuple[int, ...]]] = {}

    def update(self, logs: Iterable[tuple[str, list[int]]]) -> None:
        """Note pairs of a namespace and the tokens of a sequence."""
        for namespace, tokens in logs:
            self._logs.setdefault(namespace, set()).add(tuple(tokens))

    def has(self, namespace: str, tokens: list[int]) -> bool:
        """Whether something in the namespace begins with `tokens`."""
        prefix, length = tuple(tokens), len(tokens)
        known = self._logs.get(namespace, ())
        return not length or any(log[:length] == prefix for log in known)
