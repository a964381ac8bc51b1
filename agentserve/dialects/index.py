"""Which conversations are known: digests of histories, and where in a session each one ends.

Bounded: a principal has at most `limit` sessions here, and a session the digests of its last turns.
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

MAX_POSITIONS = 1024  # of one session: turns that a history can end at
MAX_TWINS = 8  # sessions with the same history
MAX_FAMILY = 16  # sessions that one signal stands for


class Position(msgspec.Struct, frozen=True):
    """A turn of a session. `calls` are the ids of the calls that the client was shown, in order."""

    session: str
    turn: str
    calls: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()  # calls of the turn that the client saw as text


@dataclass
class Known:
    """A session that dialect requests use. `owned`: one of them created it."""

    id: str
    root: bytes
    tag: int
    owned: bool
    last_used: float
    positions: deque[bytes] = field(default_factory=deque)
    signals: set[tuple[str, str]] = field(default_factory=set)


class Index:
    """The known conversations of one principal."""

    def __init__(self, principal: str) -> None:
        self.principal = principal
        self.sessions: OrderedDict[str, Known] = OrderedDict()  # least recently used first
        self._positions: dict[bytes, dict[str, Position]] = {}
        self._families: dict[tuple[str, str], deque[str]] = {}
        self._tags: dict[int, str] = {}

    def add(self, known: Known) -> None:
        """Take a session in, as the one that was used last."""
        self.sessions[known.id] = known
        self._tags[known.tag] = known.id

    def used(self, session: str, now: float) -> None:
        """Note a use of a session."""
        if known := self.sessions.get(session):
            known.last_used = now
            self.sessions.move_to_end(session)

    def place(self, digest: bytes, position: Position) -> None:
        """Remember that the conversation of `digest` ends at `position`."""
        known = self.sessions.get(position.session)
        if known is None:
            return
        twins = self._positions.setdefault(digest, {})
        if position.session not in twins:
            known.positions.append(digest)
        twins[position.session] = position
        if len(twins) > MAX_TWINS:
            self._drop(digest, next(iter(twins)))
        if len(known.positions) > MAX_POSITIONS:
            self._drop(known.positions.popleft(), known.id)

    def find(self, digest: bytes) -> list[Position]:
        """Return where the conversation of `digest` ends, the latest place last."""
        return list(self._positions.get(digest, {}).values())

    def join(self, signal: tuple[str, str], session: str) -> None:
        """Note that a signal stands for a session, too."""
        family = self._families.setdefault(signal, deque(maxlen=MAX_FAMILY))
        known = self.sessions.get(session)
        if known is not None and session not in family:
            if len(family) == MAX_FAMILY and (oldest := self.sessions.get(family[0])):
                oldest.signals.discard(signal)
            family.append(session)
            known.signals.add(signal)

    def family(self, signal: tuple[str, str]) -> Collection[str]:
        """Return the sessions that a signal stands for."""
        return self._families.get(signal, ())

    def tagged(self, tag: int) -> str | None:
        """Return the session that mints call ids with `tag`."""
        return self._tags.get(tag)

    def forget(self, session: str, turn: str | None = None) -> None:
        """Forget a session, or only one turn of it that is no longer there."""
        known = self.sessions.get(session)
        if known is None:
            return
        for digest in list(known.positions):
            at = self._positions.get(digest, {}).get(session)
            if turn is None or (at is not None and at.turn == turn):
                self._drop(digest, session)
        if turn is not None:
            return
        del self.sessions[session]
        self._tags.pop(known.tag, None)
        for signal in known.signals:
            family = self._families[signal]
            family.remove(session)
            if not family:
                del self._families[signal]

    def _drop(self, digest: bytes, session: str) -> None:
        twins = self._positions.get(digest, {})
        twins.pop(session, None)
        if not twins:
            self._positions.pop(digest, None)
