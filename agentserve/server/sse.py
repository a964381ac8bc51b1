"""A turn as server-sent events (WHATWG HTML, section 9.2): `id` is the event's sequence number."""

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from agentserve import wire
from agentserve.errors import AgentserveError
from agentserve.server.answers import error_body, unexpected
from agentserve.server.body import while_connected
from agentserve.sessions.handle import TurnHandle

logger = logging.getLogger(__name__)

PING = b": ping\n\n"
Numbered = tuple[int, wire.Event]


def frame(event: wire.Event, seq: int | None = None) -> bytes:
    """Return one event as the bytes of an event stream; JSON has no raw line breaks."""
    kind = str(event.__struct_config__.tag).encode()
    head = b"id: %d\n" % seq if seq is not None else b""
    return head + b"event: " + kind + b"\ndata: " + wire.encode(event) + b"\n\n"


async def frames(events: AsyncIterator[Numbered], ping_s: float) -> AsyncIterator[bytes]:
    """Yield the frames of `events`, with a ping whenever nothing came for `ping_s` seconds.

    A failure of the source becomes the `error` event that ends every unfinished stream.
    """
    following = asyncio.ensure_future(_next(events))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=ping_s)
            if not done:
                yield PING
                continue
            numbered = following.result()
            if numbered is None:
                return
            yield frame(numbered[1], numbered[0])
            following = asyncio.ensure_future(_next(events))
    except AgentserveError as error:
        yield frame(wire.ErrorEvent(error_body(error)))
    except Exception:
        logger.exception("an event stream broke")
        yield frame(wire.ErrorEvent(error_body(unexpected())))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _next(events: AsyncIterator[Numbered]) -> Numbered | None:
    return await anext(events, None)


class EventStream(StreamingResponse):
    """The events of a turn after sequence number `after`, for as long as somebody reads them.

    A reader that takes nothing for `send_timeout_s` is dropped; the turn itself is not its matter
    beyond attach and detach, by which the turn knows whether anybody is left.
    """

    def __init__(
        self, handle: TurnHandle, *, after: int, ping_s: float, send_timeout_s: float
    ) -> None:
        super().__init__(
            frames(handle.events(after), ping_s),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._handle = handle
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the turn ends, the client leaves or it stops reading."""

        async def timed(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        self._handle.attach()
        try:
            await while_connected(receive, self.stream_response(timed))
        except TimeoutError:
            logger.info("dropped a stalled reader of turn %s", self._handle.turn_id)
        finally:
            self._handle.detach()
