"""The synchronous client."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, Unpack, overload

import httpx
from agentserve_tools import Approve, ToolOutput
from agentserve_tools.background import BackgroundLoop, Job

from agentserve import wire
from agentserve.client import core, embedded
from agentserve.client.http import connection_options, lost_connections, reply_of, request_options
from agentserve.client.loop import OnEvent, ToolLoop
from agentserve.client.models import (
    HintOptions,
    Item,
    SessionOptions,
    Turn,
    TurnOptions,
)
from agentserve.client.session import (
    Input,
    Opening,
    SessionCore,
    list_sessions,
    open_session,
)
from agentserve.client.stream import StreamCore
from agentserve.client.tools import AnyTools, Tools

T = TypeVar("T")
STOP_S = 5.0  # more than a tool's process takes to be ended


class _Opened(NamedTuple):
    response: httpx.Response
    chunks: Iterator[bytes]


class Client:
    """A connection to a server; safe to use from several threads, one session from one at a time.

    Refused requests raise the classes of `agentserve.errors`, a server out of reach
    `ConnectionError`, both after the retries that `retry` allows.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        retry: core.Retry | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect to `url` when first needed; `timeout_s` bounds the wait for one answer."""
        options = connection_options(url, api_key, timeout_s)
        self._http = httpx.Client(transport=transport, **options)
        self._api = core.Api(retry)

    @classmethod
    def embedded(cls, model: str = "smollm2-135m", **settings: Any) -> Self:
        """Load `model` and return a client of a server inside this process, without a socket.

        settings: `device` ("auto", "cpu", "cuda"), `dtype` ("auto", "float32", "bfloat16"),
        `kv_bytes` (memory for KV; 0 takes a share of what is free), `host_bytes` (for KV that
        leaves the device; None takes a share, 0 is none), `threads` (0 takes every core),
        `max_slots` (sequences in one batch), or `server` and `engine`,
        `agentserve.config.ServerSettings` and `EngineSettings`. `close` ends the server.
        """
        transport = embedded.SyncTransport(embedded.start(model, settings))
        return cls(embedded.URL, transport=transport)

    def session(
        self,
        id: str | None = None,
        *,
        resume: bool = False,
        tools: AnyTools = (),
        **options: Unpack[SessionOptions],
    ) -> "Session":
        """Create a session; with `resume`, take up the one of that id when it exists."""
        wanted = Opening(id, resume, Tools(tools), options)
        return Session(self, self.drive(open_session(self._api, wanted)))

    def sessions(
        self,
        *,
        state: str | None = None,
        tier: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> wire.SessionList:
        """Return one page of this principal's sessions."""
        query = {"state": state, "tier": tier, "after": after, "limit": limit}
        return self.drive(list_sessions(self._api, query))

    def close(self) -> None:
        """Close the connections, stop tools that still run, end an embedded server."""
        self._http.close()
        if "_background" in self.__dict__:
            self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @cached_property
    def _background(self) -> BackgroundLoop:
        return BackgroundLoop("agentserve tools")

    def drive(self, flow: core.Flow[T]) -> T:
        """Carry out what `flow` asks for and return its result."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                effect = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            answer, error = None, None
            try:
                answer = self._perform(effect)
            except BaseException as raised:
                error = raised

    def _perform(self, effect: core.Effect) -> Any:
        match effect:
            case core.Send():
                return self._send(effect)
            case core.Read(stream):
                with lost_connections(self._http.base_url):
                    return next(stream.chunks, b"")
            case core.Close(stream):
                stream.response.close()
            case core.Sleep(seconds):
                time.sleep(seconds)
            case core.StartTool(call):
                return self._background.start(call())
            case core.WaitTools(handles):
                return _wait(handles)
            case core.StopTools(handles):
                _stop(handles)
            case core.Notify(callback, event):
                callback(event)
        return None

    def _send(self, effect: core.Send) -> core.Reply:
        with lost_connections(self._http.base_url):
            request = self._http.build_request(**request_options(effect))
            response = self._http.send(request, stream=effect.stream)
            if effect.stream and response.is_success:
                return reply_of(response, _Opened(response, response.iter_bytes()))
            response.read()
            return reply_of(response)


def _wait(jobs: list[Job[ToolOutput]]) -> list[ToolOutput | None]:
    ended = [job.ended for job in jobs]
    wait(ended, return_when=FIRST_COMPLETED)
    wait(ended, timeout=core.SETTLE_S)
    return [one.result() if one.done() else None for one in ended]


def _stop(jobs: list[Job[ToolOutput]]) -> None:
    """Cancel tools and wait for their end: a program may leave at once, its processes may not."""
    for job in jobs:
        job.stop()
    wait([job.ended for job in jobs], timeout=STOP_S)


class Session:
    """One conversation, owned by the server; only what is new is sent."""

    def __init__(self, client: Client, core: SessionCore) -> None:
        self._client = client
        self._core = core
        self._drive = client.drive

    def __repr__(self) -> str:
        return f"<Session {self.id} at {self.head}>"

    @property
    def id(self) -> str:
        """The session's id."""
        return self._core.id

    @property
    def head(self) -> str | None:
        """The last committed turn that this client knows of; sent along as `expect_head`."""
        return self._core.head

    @property
    def turns(self) -> list[Turn]:
        """The turns from the first to the head (asks the server)."""
        return self._drive(self._core.turns())

    def step(self, given: Input = None, **options: Unpack[TurnOptions]) -> Turn:
        """Feed text or items, generate, return the turn; None continues without new input.

        Raises the error of a turn that failed. An interrupted step is cancelled on the server.
        """
        return self._drive(self._core.step(given, options))

    def stream(self, given: Input = None, **options: Unpack[TurnOptions]) -> "TurnStream":
        """Return a context manager that yields the turn's events as they come."""
        return TurnStream(self._client, self._core, given, options)

    def run(
        self,
        prompt: Input = None,
        *,
        max_turns: int = 50,
        on_event: OnEvent | None = None,
        approve: Approve | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """Step until the model calls no tool, running its calls at the same time.

        Read-only tools start while the model still writes. Returns the last turn: after
        `max_turns`, or when a tool of the session has no function here, one whose calls are
        unanswered. Without a prompt, calls that wait are answered first. A call runs at most once:
        in a session that was taken up, one that may have run before is told to the model as
        cancelled.

        on_event: is given each event of the turns, `ToolStarted` and `ToolDone`
        approve: asked before each call (see `agentserve_tools.Executor`)
        """
        loop = ToolLoop(self._core, options, on_event, approve)
        return self._drive(loop.run(prompt, max_turns))

    def tool_results(self, results: Iterable[Item]) -> wire.ToolResultsAnswer:
        """Stage results while other tools, or the turn itself, still run."""
        return self._drive(self._core.tool_results(results))

    def hint(self, **hints: Unpack[HintOptions]) -> None:
        """Tell the server what is known about the wait until the next turn."""
        self._drive(self._core.hint(hints))

    @overload
    def fork(self, n: None = None, *, at: Turn | str | None = None, **body: Any) -> "Session": ...

    @overload
    def fork(self, n: int, *, at: Turn | str | None = None, **body: Any) -> "list[Session]": ...

    def fork(
        self, n: int | None = None, *, at: Turn | str | None = None, **body: Any
    ) -> "Session | list[Session]":
        """Return a copy that shares the KV, or a list of `n` copies.

        at: the turn to copy (default: the head); `id` and `tools_allowed` as in API.md
        """
        copies = [Session(self._client, one) for one in self._drive(self._core.fork(n, at, body))]
        return copies if n is not None else copies[0]

    def rollback(
        self, to: Turn | str | None = None, *, before: Turn | str | None = None
    ) -> wire.HeadAnswer:
        """Move the head back to a turn, or to what was before one."""
        return self._drive(self._core.rollback(to, before))

    def rewrite(self, items: Iterable[Item | Turn], *, prefill: bool = False) -> wire.HeadAnswer:
        """Replace the history; turns of this session among the items keep their token ids."""
        return self._drive(self._core.rewrite(items, prefill))

    def cancel(
        self, *, turn: str | None = None, keep: Literal["none", "input", "partial"] = "none"
    ) -> Turn:
        """Stop the running turn (call it from another thread)."""
        return self._drive(self._core.cancel({"turn": turn, "keep": keep}))

    def count(self, given: Input) -> wire.CountAnswer:
        """Return the tokens that feeding these items would take; runs nothing."""
        return self._drive(self._core.count(given))

    def transcript(
        self, format: Literal["items", "openai", "anthropic", "tokens"] = "items"
    ) -> Any:
        """Export the session as JSON data."""
        return self._drive(self._core.transcript(format))

    def info(self) -> wire.SessionInfo:
        """Return the session as the server sees it, and take over its head."""
        return self._drive(self._core.info())

    def update(self, *, tools: AnyTools | None = None, **changes: Any) -> wire.HeadAnswer:
        """Change `metadata`, `ttl_ms` or the tools; the answer says what that costs."""
        named = {"tools": Tools(tools)} if tools is not None else {}
        return self._drive(self._core.update({**changes, **named}))

    def close(self) -> None:
        """Close the session and keep its transcript."""
        self._drive(self._core.delete(keep_transcript=True))

    def delete(self) -> None:
        """Close the session and forget it."""
        self._drive(self._core.delete(keep_transcript=False))


class TurnStream:
    """A turn's events while it runs; leaving early cancels it."""

    def __init__(
        self, client: Client, session: SessionCore, given: Input, options: TurnOptions
    ) -> None:
        self._client = client
        self._session = session
        self._given = given
        self._options = options
        self._core: StreamCore | None = None

    @property
    def turn(self) -> Turn | None:
        """The turn, once it has ended."""
        return self._core.turn if self._core is not None else None

    def __enter__(self) -> Self:
        self._core = self._client.drive(self._session.open_stream(self._given, self._options))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[wire.Event]:
        return self

    def __next__(self) -> wire.Event:
        if self._core is None:
            raise RuntimeError("a stream is opened by `with session.stream(...) as stream`")
        event = self._client.drive(self._core.next_event())
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the stream; a turn that has not ended is cancelled."""
        if self._core is not None:
            self._client.drive(self._session.end_stream(self._core, self._options))
