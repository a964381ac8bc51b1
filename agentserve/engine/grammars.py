"""Which grammars are kept, compiled and waited for; the compiler itself works in another process.

A submit whose grammar is not in the cache is held, and changes nothing, until the compiler has
answered; other turns run meanwhile. One grammar is compiled at a time, those of the namespaces in
turn, each once however many turns wait for it. A compiler that is over the time limit is ended and
started anew; then the turns that wait for that grammar are refused, and no others.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentserve.clock import Clock
from agentserve.config import EngineSettings
from agentserve.engine.messages import Submit
from agentserve.engine.sequence import Matcher
from agentserve.kv.blocks import require

START_S = 60.0  # a compiler that is not up by then never will be
REMEMBER_S = 60.0  # a grammar that could not be compiled is not tried again for so long
_MAX_REFUSALS = 1024  # remembered


class Compiled(Protocol):
    """A compiled grammar, shared by all turns that use it."""

    size: int  # bytes

    def matcher(self) -> Matcher:
        """Return the state of a new constrained output."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What a compiler says of one job: a grammar, or why there is none.

    `fault` says that the compiler is to blame, not the grammar; `ended` that it is gone.
    """

    job: int
    compiled: Compiled | None = None
    error: str = ""
    fault: bool = False
    ended: bool = False


class Compiler(Protocol):
    """Compiles one job at a time, elsewhere. No method but `close` waits."""

    @property
    def ready(self) -> bool:
        """Whether it is up: the time of a job counts from then on."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when something has changed."""
        ...

    def begin(self, job: int, spec: str) -> None:
        """Compile `spec`; starts a process when there is none."""
        ...

    def poll(self) -> list[Answer]:
        """Return the answers that have come. Those of jobs that were ended may be among them."""
        ...

    def end(self) -> None:
        """End the process and whatever it does; the next job starts another."""
        ...

    def close(self) -> None:
        """End it for good; nothing of it runs in this process afterwards."""
        ...


class NotCompiled(Exception):
    """There is no such grammar; `fault` as in Answer."""

    def __init__(self, message: str, *, fault: bool = False) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(slots=True)
class Held:
    """A submit that waits for its grammar."""

    command: Submit
    key: bytes
    since: float
    outcome: "Compiled | NotCompiled | None" = None


@dataclass(slots=True)
class _Job:
    number: int
    key: bytes
    begun: float
    running_since: float = -1.0  # when the compiler was first seen ready


class Grammars:
    """The grammar cache of one engine and the turns that wait for it."""

    def __init__(self, compiler: Compiler | None, settings: EngineSettings, clock: Clock) -> None:
        self._compiler = compiler
        self._limit_s = settings.grammar_s
        self._clock = clock
        self.cache_limit = settings.grammar_cache_bytes
        self.cache_bytes = 0
        self.compiled = 0  # counters since the start
        self.refused = 0
        self.ended = 0  # compilers, by a grammar that took too much
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._refusals: OrderedDict[bytes, tuple[float, NotCompiled]] = OrderedDict()
        self._held: dict[int, Held] = {}  # by turn
        self._sequences: set[int] = set()  # of held submits
        self._queues: OrderedDict[str, deque[bytes]] = OrderedDict()  # by namespace
        self._specs: dict[bytes, str] = {}  # of what is held
        self._job: _Job | None = None
        self._jobs = 0
        self._answers: deque[Answer] = deque()

    def __len__(self) -> int:
        """Return how many submits are held."""
        return len(self._held)

    def __contains__(self, turn: int) -> bool:
        """Return whether the submit of this turn is held."""
        return turn in self._held

    def find(self, spec: str) -> Compiled | None:
        """Return a compiled grammar, None when it has to be waited for.

        Raises NotCompiled when it is known that it cannot be had.
        """
        if self._compiler is None:
            raise NotCompiled("this engine has no grammars")
        key = _key(spec)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        at, refusal = self._refusals.get(key, (0.0, None))
        if refusal is not None and self._clock.monotonic() - at < REMEMBER_S:
            raise refusal
        return None

    def hold(self, command: Submit) -> None:
        """Keep a submit until `advance` gives it back with its grammar, or with the reason."""
        assert command.grammar is not None
        key, namespace = _key(command.grammar), command.namespace
        waiting = {h.command.namespace for h in self._held.values() if h.key == key}
        self._held[command.turn] = Held(command, key, self._clock.monotonic())
        self._sequences.add(command.sequence)
        self._specs[key] = command.grammar
        if namespace not in waiting and (self._job is None or self._job.key != key):
            self._queues.setdefault(namespace, deque()).append(key)
        self._begin_next()

    def keep(self, spec: str, compiled: Compiled) -> None:
        """Put a compiled grammar into the cache."""
        self._store(_key(spec), compiled)

    def holds(self, sequence: int) -> bool:
        """Whether a submit of this sequence is held."""
        return sequence in self._sequences

    def of_sequence(self, sequence: int) -> Submit | None:
        """Return the held submit of a sequence."""
        if sequence not in self._sequences:
            return None
        return next(h.command for h in self._held.values() if h.command.sequence == sequence)

    def give_up(self, turn: int) -> Submit | None:
        """Forget a held submit and return it; what is being compiled for it is kept if it ends."""
        held = self._held.pop(turn, None)
        if held is None:
            return None
        self._sequences.discard(held.command.sequence)
        if all(other.key != held.key for other in self._held.values()):
            self._specs.pop(held.key, None)
        return held.command

    def advance(self) -> list[Held]:
        """Take what the compiler has done, end it if it is over its time, and begin the next job.

        Returns the submits that need to wait no longer, each with its outcome, the oldest first.
        """
        done: list[Held] = []
        now = self._clock.monotonic()
        for answer in self._poll():
            self.ended += answer.ended
            if self._job is not None and answer.job == self._job.number:
                done += self._close(self._job, self._outcome(answer))
        if self._job is not None and self._compiler is not None:
            if self._compiler.ready and self._job.running_since < 0:
                self._job.running_since = now
            if now >= self._deadline(self._job):
                self._compiler.end()
                self.ended += 1
                done += self._close(self._job, self._overrun(self._job))
        self._begin_next()
        return sorted(done, key=lambda held: held.since)

    def wake_in(self) -> float:
        """Return the seconds until `advance` has something to do, 0 for now, infinite for never."""
        self._answers.extend(self._compiler.poll() if self._compiler is not None else ())
        if self._answers:
            return 0.0
        if self._job is None or self._compiler is None:
            return float("inf")
        if self._compiler.ready and self._job.running_since < 0:
            return 0.0
        return max(0.0, self._deadline(self._job) - self._clock.monotonic())

    def close(self) -> None:
        """End the compiler for good."""
        if self._compiler is not None:
            self._compiler.close()

    def check(self) -> None:
        """Verify the bounds, and that what is waited for is compiled or about to be."""
        sizes = sum(compiled.size for compiled in self._cache.values())
        require(
            sizes == self.cache_bytes <= self.cache_limit, "the grammar cache is over its limit"
        )
        coming = {key for queue in self._queues.values() for key in queue}
        coming |= {self._job.key} if self._job is not None else set()
        lost = {held.key for held in self._held.values()} - coming
        require(not lost, "INV-08: a turn waits for a grammar that nobody compiles")
        require(self._job is not None or not self._held, "INV-06: a grammar waits and none runs")
        of = {held.command.sequence for held in self._held.values()}
        require(
            of == self._sequences and len(of) == len(self._held),
            "INV-10: two submits of a sequence wait for grammars",
        )

    def _poll(self) -> list[Answer]:
        if self._compiler is not None:
            self._answers.extend(self._compiler.poll())
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def _outcome(self, answer: Answer) -> Compiled | NotCompiled:
        if answer.compiled is None:
            return NotCompiled(answer.error or "it gives no grammar", fault=answer.fault)
        return answer.compiled

    def _overrun(self, job: _Job) -> NotCompiled:
        if job.running_since < 0:
            return NotCompiled("the grammar compiler does not start", fault=True)
        return NotCompiled(f"it takes longer than {self._limit_s:g} s")

    def _deadline(self, job: _Job) -> float:
        if job.running_since < 0:
            return job.begun + START_S
        return job.running_since + self._limit_s

    def _close(self, job: _Job, outcome: Compiled | NotCompiled) -> list[Held]:
        """End a job: keep its outcome, and let go of the submits that waited for it."""
        self._job = None
        if isinstance(outcome, NotCompiled):
            self.refused += 1
            if not outcome.fault:
                self._refusals[job.key] = (self._clock.monotonic(), outcome)
                self._refusals.move_to_end(job.key)
                while len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
        else:
            self.compiled += 1
            self._store(job.key, outcome)
        waited = [held for held in self._held.values() if held.key == job.key]
        for held in waited:
            held.outcome = outcome
            self.give_up(held.command.turn)
        return waited

    def _store(self, key: bytes, compiled: Compiled) -> None:
        if compiled.size > self.cache_limit:
            return
        self._cache[key] = compiled
        self.cache_bytes += compiled.size
        while self.cache_bytes > self.cache_limit:
            _, dropped = self._cache.popitem(last=False)
            self.cache_bytes -= dropped.size

    def _begin_next(self) -> None:
        """Begin the job of the namespace whose last one is the longest ago."""
        while self._job is None and self._queues and self._compiler is not None:
            namespace, queue = self._queues.popitem(last=False)
            key = queue.popleft()
            if queue:
                self._queues[namespace] = queue
            if key in self._specs:
                self._jobs += 1
                self._job = _Job(self._jobs, key, self._clock.monotonic())
                self._compiler.begin(self._jobs, self._specs[key])


def _key(spec: str) -> bytes:
    return hashlib.sha256(spec.encode()).digest()
