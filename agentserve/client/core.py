"""The protocol without I/O: a flow yields what it needs done and is sent what came of it.

A driver (`sync.py`, `aio.py`) carries out effects; everything else, such as retries, errors and
what is cancelled when, is decided here and in `session.py` once for both.
"""

import random
import uuid
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import msgspec
from agentserve_tools import ToolOutput

from agentserve import wire
from agentserve.errors import CATALOGUE, AgentserveError

T = TypeVar("T")


SETTLE_S = 0.02  # results so close together are worth one request
FIRST_CONTACT_S = 2.0  # a server that never answered gets so long to accept a connection


class Unreachable(ConnectionError):
    """No connection came about, so the server saw nothing; `spent_s` passed in trying."""

    def __init__(self, message: str, spent_s: float = 0.0) -> None:
        super().__init__(message)
        self.spent_s = spent_s


@dataclass(frozen=True, slots=True)
class Send:
    """Do one HTTP request -> Reply. Raises ConnectionError when no whole answer came.

    That is `Unreachable` when not even a connection came about.

    With `stream`, the body of a 2xx answer stays unread behind `Reply.stream`.
    """

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; `headers` has lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    stream: Any = None


@dataclass(frozen=True, slots=True)
class Read:
    """Read more of an open stream -> bytes, b"" at its end. Raises ConnectionError."""

    stream: Any


@dataclass(frozen=True, slots=True)
class Close:
    """Close an open stream."""

    stream: Any


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StartTool:
    """Start a tool call in the background -> a handle."""

    call: Callable[[], Coroutine[Any, Any, ToolOutput]]


@dataclass(frozen=True, slots=True)
class WaitTools:
    """Wait until a started call has ended -> a list in the order of the handles.

    It has an output for each that ended then or within SETTLE_S, None for one that still runs.
    """

    handles: list[Any]


@dataclass(frozen=True, slots=True)
class StopTools:
    """Cancel started calls; nobody wants their outputs any more."""

    handles: list[Any]


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the user's callback about an event."""

    callback: Callable[[Any], Any]
    event: Any


Effect: TypeAlias = Send | Read | Close | Sleep | StartTool | WaitTools | StopTools | Notify
Flow: TypeAlias = Generator[Effect, Any, T]


@dataclass(frozen=True)
class Retry:
    """When a request is sent again: 429, 503 and lost connections, nothing else.

    A server that has never answered and takes no connection is given up after 2 s.
    Attempt n waits between half and all of `first_s` * 2**n, at most `longest_s`; a Retry-After of
    the server counts as the least, cut to `longest_s` as well.
    """

    attempts: int = 8
    first_s: float = 0.25
    longest_s: float = 10.0

    def delay_s(self, attempt: int, retry_after: str | None, rng: random.Random) -> float:
        """Return the seconds to wait after failed attempt number `attempt` (from 0)."""
        backoff = self.first_s * (1 << attempt) * rng.uniform(0.5, 1.0)
        asked = int(retry_after) if retry_after and retry_after.isdigit() else 0
        return min(max(backoff, asked), self.longest_s)


class Api:
    """Requests with JSON bodies and answers, retried as `retry` says."""

    def __init__(self, retry: Retry | None = None, rng: random.Random | None = None) -> None:
        self.retry = retry or Retry()
        self._rng = rng or random.Random()
        self._answered = False

    def call(self, method: str, path: str, answer: type[T], body: Any = None) -> Flow[T]:
        """Send a request and return its answer decoded as `answer`.

        Raises the class of `errors` that the server named; ConnectionError when it is unreachable.
        """
        reply = yield from self.send(self.request(method, path, body))
        return msgspec.json.decode(reply.body or b"null", type=answer)

    def request(self, method: str, path: str, body: Any = None, stream: bool = False) -> Send:
        """Return the request; a write carries a key, so that sent twice it happens once."""
        headers = {}
        if body is not None:
            headers["content-type"] = "application/json"
        if method in ("POST", "PUT"):
            headers["idempotency-key"] = str(uuid.uuid4())
        encoded = None if body is None else msgspec.json.encode(body)
        return Send(method, path, encoded, headers, stream)

    def send(self, request: Send) -> Flow[Reply]:
        """Return the answer of success to `request`, trying again where that can help."""
        waited_s = 0.0
        for attempt in range(self.retry.attempts):
            last = attempt + 1 == self.retry.attempts
            try:
                reply: Reply = yield request
            except ConnectionError as lost:
                delay_s = self.retry.delay_s(attempt, None, self._rng)
                if isinstance(lost, Unreachable):
                    waited_s += lost.spent_s
                    last = last or self._no_contact(waited_s + delay_s)
                if last:
                    raise lost.with_traceback(None) from None  # the driver's frames explain nothing
            else:
                self._answered = True
                if reply.status < 400:
                    return reply
                if reply.status not in (429, 503) or last:
                    raise_error(reply)
                delay_s = self.retry.delay_s(attempt, reply.headers.get("retry-after"), self._rng)
            waited_s += delay_s
            yield Sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def _no_contact(self, waited_s: float) -> bool:
        return not self._answered and waited_s > FIRST_CONTACT_S


def raise_error(reply: Reply) -> NoReturn:
    """Raise the error that an answer describes."""
    try:
        body = msgspec.json.decode(reply.body, type=wire.ErrorAnswer).error
    except msgspec.DecodeError:
        text = reply.body[:200].decode(errors="replace")
        raise AgentserveError(f"the server answered HTTP {reply.status}: {text}") from None
    raise error_of(body)


def error_of(body: wire.ErrorBody) -> AgentserveError:
    """Return the exception of an error body; an unknown code becomes the base class."""
    kind = CATALOGUE.get(body.code)
    error = kind(body.message) if kind else AgentserveError(f"{body.code}: {body.message}")
    error.param = body.param
    error.details = body.details
    return error
