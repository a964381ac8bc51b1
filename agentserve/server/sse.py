"""A turn as server-sent events (WHATWG HTML, section 9.2): `id` is the event's sequence number."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from agentserve import wire
from agentserve.errors import AgentserveError
from agentserve.server.answers import unexpected
from agentserve.server.body import while_connected
from agentserve.sessions.handle import FellBehind, TurnHandle

logger = logging.getLogger(__name__)

PING = b": ping\n\n"
_TERMINAL = (wire.TurnDone, wire.ErrorEvent)


class Last(bytes):
    """The frames that end a stream."""


def frame(event: wire.Event, seq: int | None = None) -> bytes:
    """Return one event as the bytes of an event stream; JSON has no raw line breaks."""
    kind = str(event.__struct_config__.tag).encode()
    head = b"id: %d\n" % seq if seq is not None else b""
    return head + b"event: " + kind + b"\ndata: " + wire.encode(event) + b"\n\n"


def ignore(_: str) -> None:
    """Take the reason why a reader was dropped, and do nothing."""


async def frames(
    runs: AsyncIterator[list[tuple[int, wire.Event]]], on_drop: Callable[[str], None] = ignore
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of events, those of a run together.

    A failure of the source becomes the `error` event that ends every unfinished stream. It has no
    id: a reader that resumes goes on after the last event that it was sent.
    """
    try:
        async for run in runs:
            data = b"".join(frame(event, seq) for seq, event in run)
            yield Last(data) if isinstance(run[-1][1], _TERMINAL) else data
    except AgentserveError as error:
        if isinstance(error, FellBehind):
            on_drop("behind")
        yield Last(frame(wire.ErrorEvent(wire.error_body(error))))
    except Exception:
        logger.exception("an event stream broke")
        yield Last(frame(wire.ErrorEvent(wire.error_body(unexpected()))))


class EventStream(StreamingResponse):
    """The frames of a turn, for as long as somebody reads them.

    A ping fills every silence of `ping_s` seconds. A reader that takes nothing for
    `send_timeout_s` is dropped ("stalled"), and so is one that the event buffer has left behind
    ("behind"); `on_drop` is told. The turn learns from attach and detach whether anybody is left.
    """

    def __init__(
        self,
        handle: TurnHandle,
        frames: AsyncGenerator[bytes, None],
        *,
        ping_s: float,
        send_timeout_s: float,
        on_drop: Callable[[str], None] = ignore,
        ping: bytes = PING,
    ) -> None:
        self._frames = frames
        super().__init__(
            self._frames,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._handle = handle
        self._ping = _chunk(ping)
        self._ping_s = ping_s
        self._send_timeout_s = send_timeout_s
        self._on_drop = on_drop
        self._sent_at = 0.0  # the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the turn ends, the client leaves or it stops reading."""

        async def timed(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
            self._sent_at = asyncio.get_running_loop().time()

        self._handle.attach()
        try:
            await while_connected(receive, self._deliver(timed))
        except* TimeoutError:
            self._on_drop("stalled")
            logger.info("dropped a stalled reader of turn %s", self._handle.turn_id)
        finally:
            self._handle.detach()

    async def _deliver(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._frames), asyncio.TaskGroup() as group:
            pings = group.create_task(self._fill_silence(send))
            async for data in self._frames:
                if isinstance(data, Last):
                    break
                await send(_chunk(data))
            else:
                data = b""
            pings.cancel()  # it takes a moment, which the last byte need not wait for
            await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _fill_silence(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            due = self._sent_at + self._ping_s
            if due <= loop.time():
                await send(self._ping)
                due = self._sent_at + self._ping_s
            await asyncio.sleep(due - loop.time())


def _chunk(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
