"""Where accepted and committed turns are written; bytes only, so that a file can follow.

Records are JSON: tools and metadata hold integers of any size, which msgpack has no form for.

The contract: `accept` returns before the turn is queued, `commit` returns before `turn.done` is
sent. What a client was told is therefore always in the store.
"""

from typing import Protocol

from agentserve.errors import StoreFull


class Store(Protocol):
    """Records of one session under keys such as "session", "staged" and "t_4"."""

    size: int  # bytes held now

    async def accept(self, session: str, turn: str, record: bytes) -> None:
        """Write that `turn` will run. Raises StoreFull."""
        ...

    async def commit(self, session: str, turn: str, record: bytes) -> None:
        """Replace the accepted record of `turn` by how it ended. Raises StoreFull."""
        ...

    async def load(self, session: str, turn: str) -> bytes | None:
        """Return the last record of `turn`, or None."""
        ...

    async def forget(self, session: str, turn: str) -> None:
        """Drop one record; unknown ones are ignored."""
        ...

    async def delete(self, session: str) -> None:
        """Drop every record of the session."""
        ...


class MemoryStore:
    """A Store in memory, bounded by the bytes of its records."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = max_bytes
        self._sessions: dict[str, dict[str, bytes]] = {}
        self.size = 0

    async def accept(self, session: str, turn: str, record: bytes) -> None:
        """Write that `turn` will run. Raises StoreFull."""
        self._put(session, turn, record)

    async def commit(self, session: str, turn: str, record: bytes) -> None:
        """Replace the accepted record of `turn`. Raises StoreFull."""
        self._put(session, turn, record)

    async def load(self, session: str, turn: str) -> bytes | None:
        """Return the last record of `turn`, or None."""
        return self._sessions.get(session, {}).get(turn)

    async def forget(self, session: str, turn: str) -> None:
        """Drop one record; unknown ones are ignored."""
        self.size -= len(self._sessions.get(session, {}).pop(turn, b""))

    async def delete(self, session: str) -> None:
        """Drop every record of the session."""
        self.size -= sum(map(len, self._sessions.pop(session, {}).values()))

    def _put(self, session: str, turn: str, record: bytes) -> None:
        records = self._sessions.setdefault(session, {})
        grown = self.size + len(record) - len(records.get(turn, b""))
        if grown > self._max_bytes:
            raise StoreFull(
                f"the store holds {self.size} of {self._max_bytes} bytes: delete sessions"
            )
        records[turn] = record
        self.size = grown
