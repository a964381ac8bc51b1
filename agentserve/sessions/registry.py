"""Which sessions there are: names within a principal, quotas, tombstones, expiry."""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from agentserve.clock import Clock
from agentserve.errors import (
    InvalidRequest,
    QuotaExceeded,
    SessionClosed,
    SessionExists,
    SessionNotFound,
)
from agentserve.sessions.ids import new_session_id
from agentserve.sessions.mirror import Mirror
from agentserve.sessions.session import Profile, Session
from agentserve.wire import CreateRequest

MAX_TOMBSTONES = 100_000

Name = tuple[str, str]  # (principal, session id)


class Registry:
    """Sessions by (principal, id). What another principal owns does not exist here."""

    def __init__(
        self, clock: Clock, source: random.Random, max_sessions: int, sequences: Iterator[int]
    ) -> None:
        self._clock = clock
        self._random = source
        self._max_sessions = max_sessions
        self._sessions: dict[Name, Session] = {}
        self._bodies: dict[Name, bytes] = {}
        self._tombstones: OrderedDict[Name, None] = OrderedDict()
        self._counts: dict[str, int] = {}
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, principal: str, session_id: str) -> Session:
        """Return a session, closed ones with a kept transcript too.

        Raises SessionNotFound, or SessionClosed for one that this principal deleted.
        """
        name = (principal, session_id)
        session = self._sessions.get(name)
        if session is not None:
            return session
        if name in self._tombstones:
            raise SessionClosed("the session was deleted", param="id")
        raise SessionNotFound("no such session", param="id")

    def open(self, principal: str, session_id: str) -> Session:
        """Return a session that can still be used."""
        session = self.get(principal, session_id)
        if session.closed:
            raise SessionClosed("the session was closed; only its transcript is kept", param="id")
        return session

    def of(self, principal: str) -> list[Session]:
        """Return a principal's sessions, oldest first."""
        return [session for (owner, _), session in self._sessions.items() if owner == principal]

    def all(self) -> list[Session]:
        """Return every session."""
        return list(self._sessions.values())

    def existing(self, principal: str, request: CreateRequest) -> Session | None:
        """Return the session that the same body created. Raises SessionExists for another body."""
        if request.id is None:
            return None
        session = self._sessions.get((principal, request.id))
        if session is None:
            return None
        if session.closed:
            raise SessionExists(
                f"the session {request.id!r} is closed and keeps its transcript: delete it first",
                param="id",
            )
        if self._bodies.get((principal, request.id)) != _digest(request):
            raise SessionExists(
                f"the session {request.id!r} was created with another body", param="id"
            )
        return session

    def require_quota(self, principal: str, wanted: int = 1) -> None:
        """Raise QuotaExceeded when `wanted` sessions more are too many."""
        count = self._counts.get(principal, 0)
        if count + wanted > self._max_sessions:
            raise QuotaExceeded(
                f"{count} of {self._max_sessions} sessions are open: delete some",
                limit=self._max_sessions,
            )

    def new(self, principal: str, session_id: str | None, profile: Profile) -> Session:
        """Return a session that is not yet listed. Raises QuotaExceeded, SessionExists."""
        self.require_quota(principal)
        name = session_id or new_session_id(self._random)
        if (principal, name) in self._sessions:
            raise SessionExists(f"there is a session {name!r} already", param="id")
        now = self._clock.time()
        return Session(
            id=name,
            principal=principal,
            tag=self._random.getrandbits(64),
            profile=profile,
            mirror=Mirror(next(self._sequences), principal),
            created_at=now,
            template_now=now,
            last_active=now,
        )

    def add(self, session: Session, request: CreateRequest | None = None) -> None:
        """List a session from now on."""
        name = (session.principal, session.id)
        if name in self._sessions:
            raise SessionExists(f"there is a session {session.id!r} already", param="id")
        self._sessions[name] = session
        self._tombstones.pop(name, None)
        self._counts[session.principal] = self._counts.get(session.principal, 0) + 1
        if request is not None:
            self._bodies[name] = _digest(request)

    def discard(self, session: Session) -> bool:
        """Unlist a session as if it had never been; return whether it was listed."""
        name = (session.principal, session.id)
        if self._sessions.pop(name, None) is None:
            return False
        self._bodies.pop(name, None)
        self._counts[session.principal] -= 1
        if not self._counts[session.principal]:
            del self._counts[session.principal]
        return True

    def remove(self, session: Session) -> None:
        """Unlist a session; its owner is told that it was closed."""
        if not self.discard(session):
            return
        self._tombstones[(session.principal, session.id)] = None
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def expired(self) -> list[Session]:
        """Return the sessions whose ttl has run out."""
        now = self._clock.time()
        ends = ((session, session.expires_at()) for session in self._sessions.values())
        return [session for session, end in ends if end is not None and end <= now]


def require_one_id(session_id: str | None, count: int) -> None:
    """Raise InvalidRequest when one id is to name several sessions."""
    if session_id is not None and count > 1:
        raise InvalidRequest("one id cannot name several sessions", param="id")


def _digest(request: CreateRequest) -> bytes:
    return hashlib.sha256(msgspec.json.encode(request)).digest()
