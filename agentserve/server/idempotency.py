"""Idempotency-Key: the same request sent twice has one effect and one answer.

The first request under a key runs; the same body under that key gets what the first got, also
while it still runs. Only answers of success are kept: a refused request changed nothing, so its
key stays free and a later try is judged afresh.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentserve.clock import Clock
from agentserve.errors import IdempotencyMismatch, InvalidRequest

MAX_KEY_LENGTH = 255
ENTRY_OVERHEAD = 1024  # bytes, about what an entry takes beside the stored body

Scope = tuple[str, str, str]  # principal, method and path, key


@dataclass(frozen=True)
class Answer:
    """What a request gave: a JSON body, or the turn that it started."""

    status: int
    body: bytes = b""
    turn_id: str | None = None


@dataclass
class _Entry:
    digest: bytes
    expires: float
    answer: "asyncio.Future[Answer]"
    size: int = 0


def check_key(key: str) -> str:
    """Return `key`; raises InvalidRequest when it is empty or too long to be kept."""
    if not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise InvalidRequest(
            f"the key must have 1 to {MAX_KEY_LENGTH} characters", param="Idempotency-Key"
        )
    return key


class AnswerLedger:
    """Answers by key for `ttl_s` seconds, at most `max_entries` and about `max_bytes` of them.

    The oldest finished answers make room for new ones; a request that still runs is never dropped.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        ttl_s: float = 24 * 3600.0,
        max_entries: int = 10_000,
        max_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Scope, _Entry] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def knows(self, scope: Scope) -> bool:
        """Return whether a request under `scope` was answered or still runs."""
        return scope in self._entries

    async def once(
        self, scope: Scope, body: bytes, run: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, bool]:
        """Return the answer under `scope`, and whether it is a replay; `run` makes a new one.

        Raises IdempotencyMismatch when the key was used with another body, and whatever `run`
        raises, which every request waiting for the same answer gets too.
        """
        self._expire()
        digest = hashlib.sha256(body).digest()
        if (entry := self._entries.get(scope)) is not None:
            if entry.digest != digest:
                raise IdempotencyMismatch(
                    "this key was used with another body", param="Idempotency-Key"
                )
            return await asyncio.shield(entry.answer), True
        return await self._first(scope, digest, run), False

    async def _first(
        self, scope: Scope, digest: bytes, run: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        entry = _Entry(digest, self._clock.monotonic() + self._ttl_s, future)
        self._entries[scope] = entry
        try:
            answer = await run()
        except BaseException as error:
            del self._entries[scope]
            _fail(future, error)
            raise
        future.set_result(answer)
        entry.size = len(answer.body) + ENTRY_OVERHEAD
        self.bytes += entry.size
        self._make_room()
        return answer

    def _expire(self) -> None:
        now = self._clock.monotonic()
        while self._entries:
            scope, entry = next(iter(self._entries.items()))
            if entry.expires > now or not entry.answer.done():
                return
            self._drop(scope)

    def _make_room(self) -> None:
        finished = (scope for scope, entry in self._entries.items() if entry.answer.done())
        victims = []
        spare_entries = len(self._entries) - self._max_entries
        spare_bytes = self.bytes - self._max_bytes
        while spare_entries > 0 or spare_bytes > 0:
            scope = next(finished, None)
            if scope is None:
                break
            victims.append(scope)
            spare_entries -= 1
            spare_bytes -= self._entries[scope].size
        for scope in victims:
            self._drop(scope)

    def _drop(self, scope: Scope) -> None:
        self.bytes -= self._entries.pop(scope).size


def _fail(future: "asyncio.Future[Answer]", error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        future.cancel()
        return
    future.set_exception(error)
    future.exception()  # marks it as seen: often nobody else waits
