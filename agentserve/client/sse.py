"""Server-sent events from bytes that arrive cut anywhere (WHATWG HTML, section 9.2)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One event: its data, and the id of the newest event that had one."""

    data: bytes
    id: str


class SSEParser:
    """Feed it bytes, get whole messages; comments and unknown fields are passed over.

    Lines end in LF or CRLF (a lone CR, which the standard allows too, is never sent to us).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._id = ""
        self.last_id = ""

    def feed(self, chunk: bytes) -> list[Message]:
        """Return the messages that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [message for line in lines if (message := self._line(line.removesuffix(b"\r")))]

    def restart(self) -> None:
        """Forget what a lost connection left incomplete; the last id stays."""
        self._rest = b""
        self._data = []
        self._id = self.last_id

    def _line(self, line: bytes) -> Message | None:
        if not line:
            data, self._data = self._data, []
            self.last_id = self._id
            return Message(b"\n".join(data), self.last_id) if data else None
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"id":
            self._id = value.decode()
        return None
