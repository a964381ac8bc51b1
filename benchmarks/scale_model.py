"""A runner that computes only how long an H200 with an 8B model would take, in virtual time.

It holds no tokens and no KV: the next token is always 0. A step lasts as long as its arithmetic and
its memory traffic; copies between the tiers end after their bytes over the link, each direction on
a stream of its own. The constants are those of published parts and of rates that good kernels
reach: a cost model, not a measurement.
"""

import heapq
from dataclasses import dataclass, field

from agentserve.clock import VirtualClock
from agentserve.engine.plan import KvGroup, Row, RunnerInfo, StepPlan, StepResult, Traffic

MOMENT_S = 0.001  # how long `collect` waits for a copy when there is nothing to compute


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU, its host link, and a dense 8B model with grouped-query attention in bfloat16."""

    weight_bytes: float = 16.1e9
    token_bytes: int = 128 * 1024  # KV of a token
    attention_flops: int = 4 * 32 * 4096  # of a token for each token before it
    flops: float = 0.55 * 989e12
    bytes_per_s: float = 0.8 * 4.8e12
    link_bytes_per_s: float = 50e9  # each way
    overhead_s: float = 0.0005  # of a forward pass
    pass_tokens: int = 8192  # the token budget of a pass

    def step_s(self, rows: list[Row]) -> float:
        """Return the seconds of one forward pass.

        The linear layers are bound by arithmetic (2 FLOP a weight and token) or by the bytes of the
        weights; attention of prefill rows by arithmetic, that of decode rows (one token) by the
        bytes of their KV. The three parts follow one another.
        """
        count = decode_context = 0
        pairs = 0.0
        for row in rows:
            count += row.count
            if row.count == 1:
                decode_context += row.start + 1
            else:
                pairs += row.count * (row.start + row.count / 2)
        if not count:
            return 0.0
        linear = max(
            self.weight_bytes / self.bytes_per_s,
            count * self.weight_bytes / self.flops,  # two bytes a weight, so FLOP are bytes
        )
        prefill = pairs * self.attention_flops / self.flops
        decode = decode_context * self.token_bytes / self.bytes_per_s
        return self.overhead_s + linear + prefill + decode


@dataclass(slots=True)
class Stream:
    """Copies in one direction, one after another."""

    bytes_per_s: float
    free_at: float = 0.0
    moved: int = 0
    busy_s: float = 0.0

    def queue(self, now: float, size: int) -> float:
        """Start a copy of `size` bytes as soon as the stream is free; return when it ends."""
        seconds = size / self.bytes_per_s
        self.free_at = max(now, self.free_at) + seconds
        self.moved += size
        self.busy_s += seconds
        return self.free_at


@dataclass(slots=True)
class Step:
    """A launched step and when it ends."""

    plan: StepPlan
    ends_at: float
    tickets: list[int]  # copies within the device, which end with the step


@dataclass(slots=True)
class CostRunner:
    """Advances `clock` by what each step takes. `wake_at`: when the next command will come."""

    info: RunnerInfo
    machine: Machine
    clock: VirtualClock
    wake_at: float = float("inf")
    busy_s: float = 0.0
    _streams: dict[str, Stream] = field(init=False)
    _copies: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rate = self.machine.link_bytes_per_s
        self._streams = {"load": Stream(rate), "save": Stream(rate)}

    def launch(self, plan: StepPlan) -> Step:
        """Queue the copies and the rows of a plan."""
        now = self.clock.monotonic()
        tickets = []
        for copy in plan.copies:
            if copy.kind == "device":
                tickets.append(copy.ticket)
            else:
                size = self.info.groups[copy.group].block_bytes
                ends_at = self._streams[copy.kind].queue(now, size)
                heapq.heappush(self._copies, (ends_at, copy.ticket))
        seconds = self.machine.step_s(plan.rows)
        self.busy_s += seconds
        ends_at = now + seconds if plan.rows or tickets else self._moment(now)
        return Step(plan, ends_at, tickets)

    def sample(self, handle: Step, masks: dict[int, bytes]) -> None:
        """Do nothing: any token will do."""

    def collect(self, handle: Step) -> StepResult:
        """Let the step's time pass and return a token for each row that samples."""
        now = max(self.clock.monotonic(), handle.ends_at)
        self.clock.advance(now - self.clock.monotonic())
        tickets = handle.tickets
        while self._copies and self._copies[0][0] <= now:
            tickets.append(heapq.heappop(self._copies)[1])
        if handle.plan.overdue:
            open_tickets = {ticket for _, ticket in self._copies}
            tickets += [t for t in handle.plan.overdue if t not in open_tickets]
        rows = handle.plan.rows
        load, save = self._streams["load"], self._streams["save"]
        return StepResult(
            step=handle.plan.step,
            tokens=[[0] if row.sample else [] for row in rows],
            finite=[True] * len(rows),
            tickets=tickets,
            traffic=Traffic(save.moved, save.busy_s, load.moved, load.busy_s),
        )

    def _moment(self, now: float) -> float:
        """Return when a step without rows comes back: a copy ended, or a command is waiting."""
        ends_at = self._copies[0][0] if self._copies else now + MOMENT_S
        return max(now, min(ends_at, self.wake_at))


def runner_info(
    machine: Machine, device_tokens: int, host_bytes: float, block_tokens: int
) -> RunnerInfo:
    """Return the sizes that the engine decides by."""
    block_bytes = block_tokens * machine.token_bytes
    return RunnerInfo(
        model="8B cost model",
        identity="cost-model",
        vocab_size=1 << 30,
        max_context=1 << 18,
        block_size=block_tokens,
        num_blocks=device_tokens // block_tokens,
        max_slots=64,
        groups=[KvGroup("full", 32, block_bytes)],
        dtype="bfloat16",
        device="cost model of an H200",
        weight_bytes=int(machine.weight_bytes),
        host_blocks=int(host_bytes // block_bytes),
    )
