"""What a client holds of a turn: its events, replayable by sequence number, and its result."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from msgspec.structs import replace

from agentserve.clock import Clock
from agentserve.errors import Overloaded
from agentserve.sessions.logprobs import told_without, without_logprobs
from agentserve.wire import (
    ErrorEvent,
    Event,
    ItemDone,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Turn,
    TurnDone,
    TurnProgress,
    TurnStarted,
    encode,
)

EVENT_BUFFER_BYTES = 1 << 20  # of one turn; a reader that is further behind is dropped
MOST_TOGETHER = 32  # events that a reader is given at once
_EVENT_BYTES = 96  # an event without its text
_LOGPROB_BYTES = 256  # one token with its text and bytes


class FellBehind(Overloaded):
    """A reader wanted an event that the buffer no longer has. The turn goes on."""


class TurnHandle:
    """The readable side of one turn. The engine never waits for a reader.

    Sequence numbers start at 1. The buffer is bounded by bytes: the oldest events go first, and a
    reader that still wanted one of them is told so (FellBehind), while the turn goes on.
    """

    def __init__(self, turn_id: str, clock: Clock, *, max_bytes: int = EVENT_BUFFER_BYTES) -> None:
        self.turn_id = turn_id
        self.readers = 0
        self.left_at: float | None = None  # when the last reader went, in clock.monotonic()
        self.buffered = 0  # bytes
        self._clock = clock
        self._max_bytes = max_bytes
        self._events: deque[tuple[Event, int]] = deque()
        self._last = 0
        self._turn: Turn | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """Whether the turn has ended."""
        return self._turn is not None

    def attach(self) -> None:
        """Count a reader."""
        self.readers += 1
        self.left_at = None

    def detach(self) -> None:
        """Count a reader out; the last one starts the grace period of `on_disconnect`."""
        self.readers -= 1
        if self.readers == 0:
            self.left_at = self._clock.monotonic()
            self.lighten()

    def publish(self, event: Event) -> None:
        """Append an event, dropping the oldest ones beyond the bound."""
        size = _size(event)
        self._events.append((event, size))
        self._last += 1
        self.buffered += size
        while self.buffered > self._max_bytes and len(self._events) > 1:
            self.buffered -= self._events.popleft()[1]
        self._wake()

    def end(self, turn: Turn, terminal: Event) -> None:
        """Publish the one terminal event; `turn` is the result."""
        self._turn = turn
        self.publish(terminal)

    def lighten(self) -> None:
        """Let log probabilities go that no buffered delta has, once the last reader went.

        The bound does not count them twice, so it counts them no longer when the deltas are gone.
        """
        turn, whole = self._turn, len(self._events) == self._last
        if turn is None or whole or self.readers:
            return
        if not any(getattr(item, "logprobs", ()) for item in turn.output):
            return
        self._turn = told_without(turn)
        self._events = deque((_bare(event), size) for event, size in self._events)

    async def events(self, after: int = 0) -> AsyncIterator[tuple[int, Event]]:
        """Yield (sequence number, event) after `after`, up to the terminal event; see `runs`."""
        async for run in self.runs(after, most=1):
            yield run[0]

    async def runs(
        self, after: int = 0, *, most: int = MOST_TOGETHER
    ) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yield what is there of (sequence number, event) after `after`, up to the terminal event.

        The terminal event comes in any case, also to a reader who says that it has seen it. It
        comes alone to one who begins after the end, when the beginning is gone. Raises FellBehind
        when the next event is gone: `oldest_event` in its details is the first that can still be
        read.
        """
        late = self.done and after == 0 and len(self._events) < self._last
        seen = self._last - 1 if late else min(after, self._last - 1 if self.done else self._last)
        while True:
            while seen < self._last:
                oldest = self._last - len(self._events) + 1
                if seen + 1 < oldest:
                    raise FellBehind(
                        f"this reader fell behind; follow the turn after event {oldest - 1}",
                        oldest_event=oldest,
                    )
                last = min(self._last, seen + most)
                run = [(n, self._events[n - oldest][0]) for n in range(seen + 1, last + 1)]
                seen = last
                yield run
            if self.done:
                return
            await self._wait()

    async def result(self) -> Turn:
        """Wait for the end of the turn and return it, whatever its status."""
        while self._turn is None:
            await self._wait()
        return self._turn

    async def _wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


def _size(event: Event) -> int:
    """Return about what an event takes; log probabilities count where they come first."""
    if isinstance(event, TextDelta):
        told = sum(1 + len(one.top) for one in event.logprobs)
        return _EVENT_BYTES + len(event.delta) + told * _LOGPROB_BYTES
    if isinstance(event, ReasoningDelta | ToolCallDelta):
        return _EVENT_BYTES + len(event.delta)
    if isinstance(event, TurnStarted | TurnProgress):
        return _EVENT_BYTES
    return _EVENT_BYTES + len(encode(_bare(event)))


def _bare(event: Event) -> Event:
    """Return an event without what it shares with the deltas before it."""
    if isinstance(event, ItemDone):
        (item,) = without_logprobs([event.item])
        return replace(event, item=item)
    if isinstance(event, TurnDone):
        return replace(event, turn=told_without(event.turn))
    return event


def finished_handle(turn: Turn, clock: Clock) -> TurnHandle:
    """Return the handle of a turn that ended before: it holds its terminal event only."""
    handle = TurnHandle(turn.id, clock)
    handle.end(turn, ErrorEvent(turn.error) if turn.error is not None else TurnDone(turn))
    return handle
