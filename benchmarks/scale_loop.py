"""One cell of the simulation: closed-loop agents, the real engine, a cost model, virtual time.

Each agent sends a request, waits for its output, waits as its client did, and sends the next one.
What is measured lies in the window after the warm-up.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import scale_workload
from scale_model import CostRunner, Machine, runner_info
from scale_workload import Conversation, Request

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import (
    Close,
    Event,
    Finished,
    Hint,
    Refused,
    Started,
    Submit,
    Tokens,
)
from agentserve.engine.plan import pack

START_S = 7.0  # between the first turns of two agents: about what the prefill of one takes
SETTLE_S = 300.0  # from the last first turn to the window


@dataclass(frozen=True, slots=True)
class Cell:
    """What is simulated. `device_tokens` and `host_bytes` are the room for KV in each tier."""

    policy: str
    sessions: int
    host_bytes: float
    seed: int
    device_tokens: int = 830_000
    window_s: float = 600.0
    start_s: float = START_S
    settle_s: float = SETTLE_S
    block_tokens: int = 256
    check_invariants: bool = False


@dataclass(slots=True)
class Measured:
    """What happened in the window. Times are virtual seconds."""

    output_tokens: int = 0
    turns: int = 0
    new_tokens: int = 0
    computed_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    longest_wait_s: float = 0.0  # for the first token, also of turns that never got one
    lost: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0
    busy_s: float = 0.0
    saved_bytes: int = 0
    loaded_bytes: int = 0

    @property
    def recomputed_tokens(self) -> int:
        """Tokens whose KV had been computed before."""
        return self.computed_tokens - self.new_tokens


@dataclass(slots=True)
class Agent:
    """One lane of the closed loop."""

    number: int
    conversations: Iterator[Conversation]
    requests: Iterator[Request] = field(default_factory=lambda: iter(()))
    upcoming: Request | None = None
    sequence: int = 0
    log: int = 0  # tokens of its session
    kv: int = 0  # of them had KV when the last turn ended
    turn: int = 0
    asked_at: float = 0.0
    answered_at: float = -1.0  # when the first token of the turn came

    def advance(self) -> bool:
        """Go on to the next request; True when it begins a conversation."""
        self.upcoming = next(self.requests, None)
        if self.upcoming is not None:
            return False
        self.requests = iter(next(self.conversations))
        self.upcoming = next(self.requests)
        return True


class Simulation:
    """Runs one cell. Deterministic: the same cell gives the same result."""

    def __init__(
        self, cell: Cell, conversations: list[Conversation], machine: Machine | None = None
    ) -> None:
        self.cell = cell
        machine = machine or Machine()
        self.clock = VirtualClock()
        info = runner_info(machine, cell.device_tokens, cell.host_bytes, cell.block_tokens)
        self.runner = CostRunner(info, machine, self.clock)
        settings = EngineSettings(
            token_budget=machine.pass_tokens,
            kv_policy=cell.policy,
            check_invariants=cell.check_invariants,
        )
        self.engine = Engine(self.runner, self.clock, settings)
        self.measured = Measured()
        self._numbers = itertools.count(1)
        self._agents = [
            Agent(n, scale_workload.draw(random.Random(f"{cell.seed}/{n}"), conversations))
            for n in range(cell.sessions)
        ]
        self._turns: dict[int, Agent] = {}
        self._arrivals: list[tuple[float, int]] = []

    def run(self) -> Measured:
        """Run the warm-up and the window."""
        for agent in self._agents:
            agent.advance()
            heapq.heappush(self._arrivals, (self.cell.start_s * agent.number, agent.number))
        warmup_s = self.cell.start_s * len(self._agents) + self.cell.settle_s
        self._until(warmup_s)
        before = self.engine.stats()
        busy_before = self.runner.busy_s
        self.measured = Measured()
        self._until(warmup_s + self.cell.window_s)
        after = self.engine.stats()
        measured = self.measured
        measured.busy_s = self.runner.busy_s - busy_before
        measured.steps = after.step - before.step
        measured.preemptions = after.preemptions - before.preemptions
        measured.saved_bytes = after.saved_bytes - before.saved_bytes
        measured.loaded_bytes = after.loaded_bytes - before.loaded_bytes
        for agent in self._turns.values():
            if agent.answered_at < 0:
                self._waited(self.clock.monotonic() - agent.asked_at)
        return measured

    def _until(self, end: float) -> None:
        clock, arrivals, engine = self.clock, self._arrivals, self.engine
        while clock.monotonic() < end:
            now = clock.monotonic()
            while arrivals and arrivals[0][0] <= now:
                asked_at, number = heapq.heappop(arrivals)
                self._submit(self._agents[number], asked_at)
            wake_at = min(end, arrivals[0][0] if arrivals else end)
            if engine.busy:
                self.runner.wake_at = wake_at
                for event in engine.step():
                    self._see(event)
            else:
                clock.advance(wake_at - now)

    def _submit(self, agent: Agent, asked_at: float) -> None:
        request = agent.upcoming
        if request is None:
            raise RuntimeError("an agent has nothing to ask")
        prompt = request.kept + request.new
        keep = min(request.kept, agent.log)
        if keep == 0:
            agent.sequence, agent.log, agent.kv = next(self._numbers), 0, 0
        agent.turn = next(self._numbers)
        agent.asked_at, agent.answered_at = asked_at, -1.0
        agent.log, agent.kv = prompt, min(agent.kv, keep)
        self._turns[agent.turn] = agent
        self.engine.apply(
            Submit(
                turn=agent.turn,
                sequence=agent.sequence,
                generation=1,
                keep=keep,
                tokens=pack([agent.turn]) * (prompt - keep),  # like no other turn's
                namespace="all",
                max_tokens=request.output,
                stop_ids=[],
            )
        )

    def _see(self, event: Event) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def _started(self, event: Started) -> None:
        agent = self._turns[event.turn]
        self.measured.new_tokens += agent.log - agent.kv
        self.measured.computed_tokens += event.computed
        if event.lost:
            lost = self.measured.lost
            lost[event.reason] = lost.get(event.reason, 0) + event.lost

    def _tokens(self, event: Tokens) -> None:
        agent = self._turns[event.turn]
        self.measured.output_tokens += len(event.tokens)
        if agent.answered_at < 0:
            agent.answered_at = self.clock.monotonic()
            waited = agent.answered_at - agent.asked_at
            self.measured.ttft_s.append(waited)
            self._waited(waited)

    def _finished(self, event: Finished) -> None:
        agent = self._turns.pop(event.turn)
        if event.reason not in ("length", "context"):
            raise RuntimeError(f"a turn ended unexpectedly: {event}")
        now = self.clock.monotonic()
        self.measured.turns += 1
        self.measured.turn_s.append(now - agent.asked_at)
        self.measured.computed_tokens += event.recomputed
        agent.log, agent.kv = event.log_length, event.kv_length
        sequence = agent.sequence
        begins = agent.advance()
        request = agent.upcoming
        if begins or request is None:
            self.engine.apply(Close(sequence))
            agent.log = agent.kv = 0
            heapq.heappush(self._arrivals, (now, agent.number))
            return
        self.engine.apply(Hint(sequence, tools=["tool"] if request.after_tool else []))
        heapq.heappush(self._arrivals, (now + request.wait_s, agent.number))

    def _refused(self, event: Refused) -> None:
        raise RuntimeError(f"a turn was refused: {event}")

    def _waited(self, seconds: float) -> None:
        self.measured.longest_wait_s = max(self.measured.longest_wait_s, seconds)


_HANDLERS: dict[type, Callable[..., None]] = {
    Started: Simulation._started,
    Tokens: Simulation._tokens,
    Finished: Simulation._finished,
    Refused: Simulation._refused,
}
