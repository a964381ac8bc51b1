"""The responses that can be asked for again and gone on from: in memory, bounded by bytes."""

from collections import Counter, OrderedDict
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
    """Responses by principal and id; the oldest of the principal with the most bytes make room."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._entries: dict[str, OrderedDict[str, Stored]] = {}
        self._sizes: Counter[str] = Counter()  # bytes of each principal

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def put(self, principal: str, stored: Stored) -> None:
        """Keep a response, or what has become of it."""
        name = stored.body["id"]
        self.drop(principal, name)
        stored.size = _ENTRY + len(wire.encode(stored.body)) + len(wire.encode(stored.input))
        self._entries.setdefault(principal, OrderedDict())[name] = stored
        self._count(principal, stored.size)
        while self.bytes > self._max_bytes and len(self) > 1:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.drop(largest, next(iter(self._entries[largest])))

    def get(self, principal: str, response: str) -> Stored | None:
        """Return a response, None when it is not (or no longer) here."""
        own = self._entries.get(principal)
        return own.get(response) if own is not None else None

    def drop(self, principal: str, response: str) -> bool:
        """Forget a response; return whether it was here."""
        stored = self.get(principal, response)
        if stored is None:
            return False
        del self._entries[principal][response]
        self._count(principal, -stored.size)
        return True

    def _count(self, principal: str, size: int) -> None:
        self.bytes += size
        self._sizes[principal] += size
        if not self._sizes[principal]:
            del self._sizes[principal], self._entries[principal]
