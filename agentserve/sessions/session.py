"""The state of one session: its configuration, its tree, what is staged, and who runs."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from agentserve.errors import HeadMoved, ResultConflict, SessionBusy, UnknownCallId
from agentserve.sessions.mirror import Ahead, Mirror, Prepared
from agentserve.sessions.residency import shown
from agentserve.sessions.tree import Pending, TurnNode, TurnTree
from agentserve.sessions.waits import Wait
from agentserve.wire import (
    Context,
    Hints,
    Metadata,
    Recomputed,
    Sampling,
    SessionInfo,
    Tool,
    ToolResultItem,
    Usage,
)

if TYPE_CHECKING:
    from msgspec import UnsetType

    from agentserve.sessions.handle import TurnHandle
    from agentserve.sessions.turn import TurnRun

KEPT_LOST = 64  # records of turns that committed nothing
KEPT_HANDLES = 8  # ended turns of a session whose events can still be replayed


class Profile(msgspec.Struct):
    """What a session was created with; tools and metadata can be patched."""

    model: str
    system: str | None
    tools: tuple[Tool, ...]
    sampling: Sampling
    on_template_rewrite: str
    template_options: dict[str, bool | int | float | str | None]
    ttl_ms: int | None
    metadata: Metadata
    tools_allowed: tuple[str, ...] | None = None
    tools_version: int = 0


@dataclass
class Session:
    """One conversation. Only the head moves; a running turn holds its own work until it commits."""

    id: str
    principal: str
    tag: int  # 64 bits that call ids carry
    profile: Profile
    mirror: Mirror
    created_at: float  # Unix seconds
    template_now: float  # Unix seconds that the template sees: frozen, and copied by a fork
    last_active: float
    tree: TurnTree = field(default_factory=TurnTree)
    staged: dict[str, ToolResultItem] = field(default_factory=dict)
    ahead: Ahead = field(default_factory=Ahead)
    prepared: Prepared | None = None
    running: TurnRun | None = None
    queue: deque[TurnRun] = field(default_factory=deque)
    handles: OrderedDict[str, TurnHandle] = field(default_factory=OrderedDict)
    next_turn: int = 1
    next_item: int = 1
    closed: bool = False
    hints: Hints | None = None
    wait: Wait = field(default_factory=Wait)
    usage: Usage = field(default_factory=Usage)
    lost: deque[str] = field(default_factory=deque)  # recent turns that committed nothing

    @property
    def key(self) -> str:
        """The name of this session in the store."""
        return f"{self.principal}/{self.id}"

    @property
    def head(self) -> TurnNode | None:
        """The last committed state."""
        return self.tree.head

    @property
    def head_id(self) -> str | None:
        """Its id."""
        return self.tree.head.id if self.tree.head is not None else None

    @property
    def idle(self) -> bool:
        """Whether it is open and no turn runs or waits."""
        return self.running is None and not self.queue and not self.closed

    def mint_turn(self) -> str:
        """Return the next turn id."""
        turn = f"t_{self.next_turn}"
        self.next_turn += 1
        return turn

    def mint_item(self) -> str:
        """Return the next item id."""
        item = f"i_{self.next_item}"
        self.next_item += 1
        return item

    def pending(self) -> tuple[Pending, ...]:
        """Return the calls of the head, answered by staged results or not."""
        return self.head.pending if self.head is not None else ()

    def unanswered(self, calls: tuple[Pending, ...]) -> list[Pending]:
        """Return those of `calls` for which no result is staged."""
        return [call for call in calls if call.call_id not in self.staged]

    def require_head(self, expected: str | UnsetType | None) -> None:
        """Raise HeadMoved when the caller built on another head."""
        if (isinstance(expected, str) or expected is None) and expected != self.head_id:
            raise HeadMoved(
                f"the head is {self.head_id}, not {expected}",
                param="expect_head",
                head=self.head_id,
            )

    def require_idle(self) -> None:
        """Raise SessionBusy while a turn runs or waits."""
        if self.running is not None or self.queue:
            busy = self.running or self.queue[0]
            raise SessionBusy(f"turn {busy.id} is running", turn=busy.id)

    def callable_now(self) -> tuple[Pending, ...]:
        """Return the calls that may be given results now: sent by the running turn, or pending."""
        return self.running.sent_calls() if self.running is not None else self.pending()

    def open_runs(self) -> list[TurnRun]:
        """Return the running turn and those that wait behind it."""
        return [run for run in (self.running, *self.queue) if run is not None]

    def new_results(self, items: Sequence[ToolResultItem]) -> dict[str, ToolResultItem]:
        """Return those of `items` that are not known yet, all of them checked.

        Raises UnknownCallId or ResultConflict.
        """
        new: dict[str, ToolResultItem] = {}
        waiting = {call.call_id for call in self.callable_now()}
        for item in items:
            self._check_result(new.get(item.call_id), item)
            if item.call_id in waiting and item.call_id not in self.staged:
                new[item.call_id] = item
        return new

    def _check_result(self, known: ToolResultItem | None, item: ToolResultItem) -> None:
        known = known or self.staged.get(item.call_id)
        if known is None:
            if any(call.call_id == item.call_id for call in self.callable_now()):
                return
            known = self._used(item.call_id)
        if known is None:
            raise UnknownCallId(
                f"no call {item.call_id!r} waits for a result here", param="call_id"
            )
        if known != item:
            raise ResultConflict(
                f"another result was given for the call {item.call_id!r}", param="call_id"
            )

    def _used(self, call_id: str) -> ToolResultItem | None:
        """Return the result that the running or the last turn was given for a call."""
        if self.running is not None:
            fed = self.running.fed.items
        elif self.head is not None and self.head.entries:
            fed = self.head.entries[-1].fed
        else:
            fed = ()
        for item in fed:
            if isinstance(item, ToolResultItem) and item.call_id == call_id:
                return item
        return None

    def ends_here(self) -> bool:
        """Return whether the client wanted the session closed once nothing is left to do."""
        wanted = self.hints is not None and self.hints.close
        return wanted and self.head is not None and not self.head.pending and not self.queue

    def drop_staged(self) -> None:
        """Forget staged results of calls that are no longer pending."""
        pending = {call.call_id for call in self.pending()}
        self.staged = {key: item for key, item in self.staged.items() if key in pending}

    def expires_at(self) -> float | None:
        """Return when an idle session ends, in Unix seconds."""
        if self.profile.ttl_ms is None or self.running is not None:
            return None
        return self.last_active + self.profile.ttl_ms / 1000

    def context(self, limit: int) -> Context:
        """Return how much of the model's context the head uses."""
        used = self.head.length if self.head is not None else 0
        return Context(used, limit, max(0, limit - used))

    def state(self) -> str:
        """Return the state's name."""
        if self.closed:
            return "closed"
        if self.running is not None:
            return "running" if self.running.started else "queued"
        return "awaiting_tools" if self.unanswered(self.pending()) else "idle"

    def info(self, limit: int) -> SessionInfo:
        """Return the session as clients see it."""
        expires = self.expires_at()
        kv, residency = shown(self.mirror)
        return SessionInfo(
            id=self.id,
            state=self.state(),  # type: ignore[arg-type]
            head=self.head_id,
            turns=self.head.count if self.head is not None else 0,
            model=self.profile.model,
            created_at=int(self.created_at * 1000),
            last_active_at=int(self.last_active * 1000),
            expires_at=None if expires is None else int(expires * 1000),
            pending_calls=[call.wire() for call in self.unanswered(self.pending())],
            context=self.context(limit),
            kv=kv,
            residency=residency,
            usage=self.usage,
            metadata=self.profile.metadata,
        )

    def add_usage(self, usage: Usage) -> None:
        """Add a turn's counts to the session's."""
        total = self.usage
        reasons = {part.reason: part.tokens for part in total.recomputed}
        for part in usage.recomputed:
            reasons[part.reason] = reasons.get(part.reason, 0) + part.tokens
        self.usage = Usage(
            input_tokens=total.input_tokens + usage.input_tokens,
            cached_tokens=total.cached_tokens + usage.cached_tokens,
            new_tokens=total.new_tokens + usage.new_tokens,
            recomputed=[Recomputed(tokens, reason) for reason, tokens in reasons.items()],
            output_tokens=total.output_tokens + usage.output_tokens,
            reasoning_tokens=total.reasoning_tokens + usage.reasoning_tokens,
            prepared_tokens=total.prepared_tokens + usage.prepared_tokens,
        )

    def lose(self, turn: str) -> list[str]:
        """Note a turn that committed nothing; return those whose records are old enough to go."""
        self.lost.append(turn)
        return [self.lost.popleft()] if len(self.lost) > KEPT_LOST else []

    def keep_handle(self, handle: TurnHandle) -> None:
        """Remember a handle for followers; only the last few ended ones stay."""
        self.handles[handle.turn_id] = handle
        ended = [turn for turn, known in self.handles.items() if known.done]
        for turn in ended:
            self.handles[turn].lighten()
        for turn in ended[: max(0, len(ended) - KEPT_HANDLES)]:
            del self.handles[turn]
