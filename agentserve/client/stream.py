"""One streamed turn: events out of bytes, over as many connections as it takes."""

from collections import deque
from collections.abc import Callable

import msgspec

from agentserve import wire
from agentserve.client.core import Api, Close, Flow, Read, Send, error_of
from agentserve.client.models import Turn
from agentserve.client.sse import SSEParser

_KINDS = {kind.__struct_config__.tag for kind in wire.Event.__args__}


class _Tagged(msgspec.Struct):
    type: str


def decode_event(data: bytes) -> wire.Event | None:
    """Return the event, or None for a kind that this client does not know."""
    try:
        return msgspec.json.decode(data, type=wire.Event)
    except msgspec.ValidationError:
        if msgspec.json.decode(data, type=_Tagged).type in _KINDS:
            raise
        return None


class StreamCore:
    """The events of one turn.

    When the connection is lost, the same request is sent again with the same key and the id of the
    last event seen: the server joins the running turn and goes on after that event.
    """

    def __init__(self, api: Api, request: Send, adopt: Callable[[wire.Turn], Turn]) -> None:
        self._api = api
        self._request = request
        self._adopt = adopt
        self._parser = SSEParser()
        self._ready: deque[wire.Event] = deque()
        self._stream: object = None
        self._barren = 0  # connections in a row that brought nothing
        self.turn: Turn | None = None
        self.turn_id: str | None = None
        self.ended = False

    def open(self) -> Flow[None]:
        """Start the turn. Raises what the server answers before it accepts a turn."""
        if self._parser.last_id:
            self._request.headers["last-event-id"] = self._parser.last_id
        try:
            reply = yield from self._api.send(self._request)
        except Exception:
            self.ended = True  # refused, or out of reach: no turn of ours to cancel
            raise
        self._stream = reply.stream
        self.turn_id = reply.headers.get("turn-id")

    def next_event(self) -> Flow[wire.Event | None]:
        """Return the next event, None after the last.

        Raises the error of a turn that failed, and ConnectionError when the stream cannot be
        taken up again.
        """
        while not self._ready and not self.ended:
            chunk = yield from self._read()
            messages = self._parser.feed(chunk)
            events = (decode_event(message.data) for message in messages)
            self._ready.extend(event for event in events if event is not None)
            if messages:
                self._barren = 0
            elif not chunk:
                yield from self._reopen()
        if not self._ready:
            return None
        event = self._ready.popleft()
        if isinstance(event, wire.TurnDone | wire.ErrorEvent):
            self.ended = True
            yield from self.release()
            if isinstance(event, wire.ErrorEvent):
                raise error_of(event.error)
            self.turn = self._adopt(event.turn)
        return event

    def release(self) -> Flow[None]:
        """Close the connection; says nothing about the turn."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            yield Close(stream)

    def _read(self) -> Flow[bytes]:
        try:
            chunk: bytes = yield Read(self._stream)
        except ConnectionError:
            return b""
        return chunk

    def _reopen(self) -> Flow[None]:
        yield from self.release()
        self._barren += 1
        if self._barren == self._api.retry.attempts:
            raise ConnectionError("the stream of the turn was lost and cannot be taken up again")
        self._parser.restart()
        yield from self.open()
