import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from agentserve import wire
from agentserve.clock import VirtualClock
from agentserve.errors import EngineDown
from agentserve.server.sse import PING, EventStream, frame, frames
from agentserve.sessions.handle import TurnHandle

TURN = wire.Turn("t_1", "s", None, "completed", wire.Context(1, 10, 9))


def finished() -> TurnHandle:
    handle = TurnHandle("t_1", VirtualClock())
    handle.publish(wire.TextDelta(0, "line\nbreak\u2028"))
    handle.end(TURN, wire.TurnDone(TURN))
    return handle


class Connection:
    """The server's end of one connection, driven by hand; `stalled` never takes a body."""

    def __init__(self, stalled: bool = False) -> None:
        self.sent: list[Message] = []
        self.progress = asyncio.Event()
        self.left = asyncio.Event()
        self.stalled = stalled
        self.attempts = 0

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.attempts += 1
        if self.stalled and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        self.sent.append(message)
        self.progress.set()

    async def run(self, handle: TurnHandle, after: int = 0, ping_s: float = 10) -> None:
        events = frames(handle.runs(after))
        stream = EventStream(handle, events, ping_s=ping_s, send_timeout_s=0.05)
        await stream({"type": "http"}, self.receive, self.send)

    async def until(self, data: bytes) -> None:
        while data not in self.body:
            self.progress.clear()
            await self.progress.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_a_frame_has_id_event_and_one_line_of_data() -> None:
    data = frame(wire.TextDelta(0, "a\nb\r\u2028"), 7)
    lines = data.split(b"\n")
    assert lines[:2] == [b"id: 7", b"event: text.delta"]
    assert json.loads(lines[2].removeprefix(b"data: ")) == {
        "type": "text.delta",
        "index": 0,
        "delta": "a\nb\r\u2028",
    }
    assert lines[3:] == [b"", b""]


async def test_a_finished_turn_is_sent_whole_and_the_response_ends() -> None:
    connection = Connection()
    handle = finished()
    await connection.run(handle)
    assert connection.body.count(b"\n\n") == 2
    assert connection.body.endswith(frame(wire.TurnDone(TURN), 2))
    assert [message.get("more_body") for message in connection.sent] == [None, False]
    assert handle.readers == 0


async def test_only_events_after_the_given_one_are_sent() -> None:
    connection = Connection()
    await connection.run(finished(), after=1)
    assert connection.body == frame(wire.TurnDone(TURN), 2)


async def test_silence_is_filled_with_pings_without_losing_events() -> None:
    handle = TurnHandle("t_1", VirtualClock())
    connection = Connection()
    running = asyncio.create_task(connection.run(handle, ping_s=0.01))
    await connection.until(PING * 3)
    handle.publish(wire.TextDelta(0, "x"))
    await connection.until(frame(wire.TextDelta(0, "x"), 1) + PING)
    handle.end(TURN, wire.TurnDone(TURN))
    await running
    assert connection.body.replace(PING, b"") == (
        frame(wire.TextDelta(0, "x"), 1) + frame(wire.TurnDone(TURN), 2)
    )


async def test_a_silent_turn_drops_a_reader_that_takes_no_pings() -> None:
    handle = TurnHandle("t_1", VirtualClock())
    await Connection(stalled=True).run(handle, ping_s=0.01)
    assert handle.readers == 0
    assert not handle.done


async def test_a_client_that_leaves_is_counted_out() -> None:
    handle = TurnHandle("t_1", VirtualClock())
    connection = Connection()
    running = asyncio.create_task(connection.run(handle))
    await connection.progress.wait()
    assert handle.readers == 1
    connection.left.set()
    with pytest.raises(ClientDisconnect):
        await running
    assert handle.readers == 0
    assert handle.left_at is not None
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_reader_that_stops_reading_is_dropped_and_the_turn_is_not() -> None:
    handle = finished()
    connection = Connection(stalled=True)
    await connection.run(handle)
    assert connection.attempts == 2  # the head and one frame that was never taken
    assert connection.body == b""
    assert handle.readers == 0
    late = Connection()
    await late.run(handle)
    assert late.body.endswith(frame(wire.TurnDone(TURN), 2))


@pytest.mark.parametrize(
    ("failure", "code"), [(EngineDown("gone"), "engine_down"), (KeyError("x"), "engine_error")]
)
async def test_a_broken_source_ends_with_one_error_event(failure: Exception, code: str) -> None:
    async def broken() -> AsyncIterator[list[tuple[int, wire.Event]]]:
        yield [(1, wire.TextDelta(0, "x"))]
        raise failure

    chunks = [chunk async for chunk in frames(broken())]
    assert len(chunks) == 2
    assert chunks[1].startswith(b"event: error\ndata: ")
    assert json.loads(chunks[1].split(b"data: ")[1])["error"]["code"] == code
    assert b"KeyError" not in chunks[1]


async def test_a_reader_left_behind_ends_without_an_id_so_that_resuming_misses_nothing() -> None:
    handle = TurnHandle("t_1", VirtualClock(), max_bytes=1000)
    dropped: list[str] = []
    slow = frames(handle.runs(), dropped.append)
    handle.publish(wire.TextDelta(0, "first"))
    assert await anext(slow) == frame(wire.TextDelta(0, "first"), 1)
    for _ in range(50):
        handle.publish(wire.TextDelta(0, "x"))
    (last,) = [data async for data in slow]
    assert last.startswith(b"event: error\ndata: ")
    assert json.loads(last.split(b"data: ")[1])["error"]["code"] == "overloaded"
    assert dropped == ["behind"]
