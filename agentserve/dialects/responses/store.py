"""The responses that can be asked for again and gone on from: in memory, bounded by bytes."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from agentserve import wire
from agentserve.dialects.asked import AskedCall
from agentserve.dialects.index import Position

_ENTRY = 512  # bytes of one beside its JSON


@dataclass
class Stored:
    """One response; `position` and `digest` once its turn is in the session's history.

    `lead` are the system texts that the conversation's input began with.
    """

    body: dict[str, Any]
    input: list[Any]
    session: str
    turn: str
    lead: list[str] = field(default_factory=list)
    position: Position | None = None
    digest: bytes = b""
    calls: tuple[AskedCall, ...] = ()
    size: int = 0


class ResponseStore:
    """Responses by (principal, id); the oldest make room."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, principal: str, stored: Stored) -> None:
        """Keep a response, or what has become of it."""
        key = principal, stored.body["id"]
        self.drop(*key)
        stored.size = _ENTRY + len(wire.encode(stored.body)) + len(wire.encode(stored.input))
        self._entries[key] = stored
        self.bytes += stored.size
        while self.bytes > self._max_bytes and len(self._entries) > 1:
            self.drop(*next(iter(self._entries)))

    def get(self, principal: str, response: str) -> Stored | None:
        """Return a response, None when it is not (or no longer) here."""
        return self._entries.get((principal, response))

    def drop(self, principal: str, response: str) -> bool:
        """Forget a response; return whether it was here."""
        stored = self._entries.pop((principal, response), None)
        if stored is None:
            return False
        self.bytes -= stored.size
        return True
