"""The asynchronous client: `sync.py` with `await`."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Coroutine, Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, Unpack, overload

import httpx
from agentserve_tools import Approve, ToolOutput

from agentserve import wire
from agentserve.client import core, embedded
from agentserve.client.http import connection_options, lost_connections, reply_of, request_options
from agentserve.client.loop import OnEvent, ToolLoop
from agentserve.client.models import HintOptions, Item, SessionOptions, Turn, TurnOptions
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


class _Opened(NamedTuple):
    response: httpx.Response
    chunks: AsyncIterator[bytes]


class AsyncClient:
    """A connection to a server; for use in one event loop.

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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect to `url` when first needed; `timeout_s` bounds the wait for one answer."""
        options = connection_options(url, api_key, timeout_s)
        self._http = httpx.AsyncClient(transport=transport, **options)
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
        transport = embedded.AsyncTransport(embedded.start(model, settings))
        return cls(embedded.URL, transport=transport)

    async def session(
        self,
        id: str | None = None,
        *,
        resume: bool = False,
        tools: AnyTools = (),
        **options: Unpack[SessionOptions],
    ) -> "AsyncSession":
        """Create a session; with `resume`, take up the one of that id when it exists."""
        wanted = Opening(id, resume, Tools(tools), options)
        return AsyncSession(self, await self.drive(open_session(self._api, wanted)))

    async def sessions(
        self,
        *,
        state: str | None = None,
        tier: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> wire.SessionList:
        """Return one page of this principal's sessions."""
        query = {"state": state, "tier": tier, "after": after, "limit": limit}
        return await self.drive(list_sessions(self._api, query))

    async def close(self) -> None:
        """Close the connections, end an embedded server."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def drive(self, flow: core.Flow[T]) -> T:
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
                answer = await self._perform(effect)
            except BaseException as raised:
                error = raised

    async def _perform(self, effect: core.Effect) -> Any:
        match effect:
            case core.Send():
                return await self._send(effect)
            case core.Read(stream):
                with lost_connections(self._http.base_url):
                    return await anext(stream.chunks, b"")
            case core.Close(stream):
                await stream.response.aclose()
            case core.Sleep(seconds):
                await asyncio.sleep(seconds)
            case core.StartTool(call):
                return asyncio.create_task(call())
            case core.WaitTools(handles):
                return await _wait(handles)
            case core.StopTools(handles):
                await _stop(handles)
            case core.Notify(callback, event):
                if inspect.isawaitable(pending := callback(event)):
                    await pending
        return None

    async def _send(self, effect: core.Send) -> core.Reply:
        with lost_connections(self._http.base_url):
            request = self._http.build_request(**request_options(effect))
            response = await self._http.send(request, stream=effect.stream)
            if effect.stream and response.is_success:
                return reply_of(response, _Opened(response, response.aiter_bytes()))
            await response.aread()
            return reply_of(response)


async def _wait(tasks: list[asyncio.Task[ToolOutput]]) -> list[ToolOutput | None]:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(tasks, timeout=core.SETTLE_S)
    return [one.result() if one.done() else None for one in tasks]


async def _stop(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class AsyncSession:
    """One conversation, owned by the server; only what is new is sent."""

    def __init__(self, client: AsyncClient, core: SessionCore) -> None:
        self._client = client
        self._core = core
        self._drive = client.drive

    def __repr__(self) -> str:
        return f"<AsyncSession {self.id} at {self.head}>"

    @property
    def id(self) -> str:
        """The session's id."""
        return self._core.id

    @property
    def head(self) -> str | None:
        """The last committed turn that this client knows of; sent along as `expect_head`."""
        return self._core.head

    @property
    async def turns(self) -> list[Turn]:
        """The turns from the first to the head; `await session.turns` asks the server."""
        return await self._drive(self._core.turns())

    async def step(self, given: Input = None, **options: Unpack[TurnOptions]) -> Turn:
        """Feed text or items, generate, return the turn; None continues without new input.

        Raises the error of a turn that failed. An interrupted step is cancelled on the server.
        """
        return await self._drive(self._core.step(given, options))

    def stream(self, given: Input = None, **options: Unpack[TurnOptions]) -> "AsyncTurnStream":
        """Return a context manager that yields the turn's events as they come."""
        return AsyncTurnStream(self._client, self._core, given, options)

    async def run(
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
        return await self._drive(loop.run(prompt, max_turns))

    async def tool_results(self, results: Iterable[Item]) -> wire.ToolResultsAnswer:
        """Stage results while other tools, or the turn itself, still run."""
        return await self._drive(self._core.tool_results(results))

    async def hint(self, **hints: Unpack[HintOptions]) -> None:
        """Tell the server what is known about the wait until the next turn."""
        await self._drive(self._core.hint(hints))

    @overload
    def fork(
        self, n: None = None, *, at: Turn | str | None = None, **body: Any
    ) -> Coroutine[Any, Any, "AsyncSession"]: ...

    @overload
    def fork(
        self, n: int, *, at: Turn | str | None = None, **body: Any
    ) -> Coroutine[Any, Any, "list[AsyncSession]"]: ...

    async def fork(
        self, n: int | None = None, *, at: Turn | str | None = None, **body: Any
    ) -> "AsyncSession | list[AsyncSession]":
        """Return a copy that shares the KV, or a list of `n` copies.

        at: the turn to copy (default: the head); `id` and `tools_allowed` as in API.md
        """
        found = await self._drive(self._core.fork(n, at, body))
        copies = [AsyncSession(self._client, one) for one in found]
        return copies if n is not None else copies[0]

    async def rollback(
        self, to: Turn | str | None = None, *, before: Turn | str | None = None
    ) -> wire.HeadAnswer:
        """Move the head back to a turn, or to what was before one."""
        return await self._drive(self._core.rollback(to, before))

    async def rewrite(
        self, items: Iterable[Item | Turn], *, prefill: bool = False
    ) -> wire.HeadAnswer:
        """Replace the history; turns of this session among the items keep their token ids."""
        return await self._drive(self._core.rewrite(items, prefill))

    async def cancel(
        self, *, turn: str | None = None, keep: Literal["none", "input", "partial"] = "none"
    ) -> Turn:
        """Stop the running turn (call it from another task)."""
        return await self._drive(self._core.cancel({"turn": turn, "keep": keep}))

    async def count(self, given: Input) -> wire.CountAnswer:
        """Return the tokens that feeding these items would take; runs nothing."""
        return await self._drive(self._core.count(given))

    async def transcript(
        self, format: Literal["items", "openai", "anthropic", "tokens"] = "items"
    ) -> Any:
        """Export the session as JSON data."""
        return await self._drive(self._core.transcript(format))

    async def info(self) -> wire.SessionInfo:
        """Return the session as the server sees it, and take over its head."""
        return await self._drive(self._core.info())

    async def update(self, *, tools: AnyTools | None = None, **changes: Any) -> wire.HeadAnswer:
        """Change `metadata`, `ttl_ms` or the tools; the answer says what that costs."""
        named = {"tools": Tools(tools)} if tools is not None else {}
        return await self._drive(self._core.update({**changes, **named}))

    async def close(self) -> None:
        """Close the session and keep its transcript."""
        await self._drive(self._core.delete(keep_transcript=True))

    async def delete(self) -> None:
        """Close the session and forget it."""
        await self._drive(self._core.delete(keep_transcript=False))


class AsyncTurnStream:
    """A turn's events while it runs; leaving early cancels it."""

    def __init__(
        self, client: AsyncClient, session: SessionCore, given: Input, options: TurnOptions
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

    async def __aenter__(self) -> Self:
        self._core = await self._client.drive(self._session.open_stream(self._given, self._options))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[wire.Event]:
        return self

    async def __anext__(self) -> wire.Event:
        if self._core is None:
            raise RuntimeError("a stream is opened by `with session.stream(...) as stream`")
        event = await self._client.drive(self._core.next_event())
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """End the stream; a turn that has not ended is cancelled."""
        if self._core is not None:
            await self._client.drive(self._session.end_stream(self._core, self._options))
