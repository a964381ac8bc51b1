"""Sequences and their turns: what the engine remembers between commands.

A turn is waiting, running or over. A sequence has at most one turn that is not over.
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from agentserve.engine.messages import Submit
from agentserve.engine.plan import SAMPLED
from agentserve.kv.chains import Chain


class Matcher(Protocol):
    """The state of one constrained output."""

    def prepare(self) -> None:
        """Do what the first use needs; called while the device computes."""
        ...

    def mask(self) -> bytes | None:
        """Return the packed bitmask of allowed next tokens; None allows any."""
        ...

    @property
    def broken(self) -> bool:
        """Whether it had to accept a token that it would not allow."""
        ...

    def accept(self, token: int) -> None:
        """Advance by `token`; safe for forced tokens that the grammar would not allow."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's copy of a session's tokens (`log`) and the KV that goes with them."""

    id: int
    generation: int
    namespace: str
    chain: Chain
    log: "array[int]" = field(default_factory=lambda: array("i"))
    turn: "Turn | None" = None
    waits: bool = False  # a turn has ended and none has come since
    stall_s: float = 0.0  # time that its turns have waited for copies
    service: float = 0.0  # seconds of engine time charged to it: its virtual time (fairness)


@dataclass(slots=True, eq=False)
class Turn:
    """One turn on its way through the engine. Times are the clock's monotonic seconds."""

    command: Submit
    sequence: Sequence
    arrival: int  # order of submission; the smallest is never preempted
    submitted_at: float
    prompt_length: int  # tokens of the log before this turn's output
    forced: "array[int]"
    stop_ids: frozenset[int]
    limit: int  # length of the log at which it ends
    matcher: Matcher | None = None
    slot: int = -1  # in the batch; -1 when not running
    slot_generation: int = 0
    generated: int = 0
    started_at: float = -1.0
    first_token_at: float = -1.0
    cached: int = 0  # at the first admission
    reported: int = 0  # prefilled tokens told by Progress
    preemptions: int = 0
    recomputed: int = 0  # after preemptions
    from_host: int = 0  # tokens, at the first admission
    lost: int = 0  # tokens that had KV before this turn and were found no more
    dropped: bool = False  # the client had let them go
    admitted_at: float = -1.0  # the last time
    restoring: bool = False  # admitted, and its blocks are still on their way from the host
    restore_s: float = 0.0
    fault: str = ""
    flying: int = 0  # tokens that rows of it in flight compute
    coming: int = 0  # tokens that those rows sample

    @property
    def id(self) -> int:
        """The number that events of this turn carry."""
        return self.command.turn

    @property
    def running(self) -> bool:
        """Whether it has a slot in the batch."""
        return self.slot >= 0

    @property
    def computed(self) -> int:
        """Tokens that have KV once the rows in flight have: where the next row starts."""
        return self.sequence.chain.length + self.flying

    @property
    def pending(self) -> int:
        """Tokens that a row can compute now: 1 while decoding, more in prefill.

        What rows in flight sample counts as logged, unless it is known to end the turn.
        """
        length = len(self.sequence.log) + self.coming
        if self.coming and (length >= self.limit or self.next_forced in self.stop_ids):
            return 0
        return length - self.computed

    @property
    def next_forced(self) -> int:
        """The token that comes next whatever is sampled; SAMPLED if there is none."""
        return self.forced[self.generated] if self.generated < len(self.forced) else SAMPLED
