"""The connection to one MCP server: opened when it is needed, by a task that also closes it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TextIO, TypeAlias, cast

import httpx2
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.exceptions import MCPError

from agentserve_tools.mcp_config import HttpServer, ServerConfig, StdioServer, UnusableServer

# Also what `mcp.Client` connects to by itself: a server object of the mcp package, in this process.
Target: TypeAlias = ServerConfig | Any

_CONNECT_S = 30.0
_HTTP_TIMEOUT = httpx2.Timeout(30.0, read=300.0)  # a read may be a stream that is held open
_REASON = 300  # characters
_LIST_CHANGED = "notifications/tools/list_changed"


class ServerFailed(Exception):
    """The server cannot be reached or started; the message says why."""


class Connection:
    """One server. For use in one event loop."""

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self.list_changed = True  # what is known of its tools, nothing at first, is out of date
        self._target = target
        self._opening = asyncio.Lock()
        self._owner: asyncio.Task[None] | None = None

    async def client(self) -> Client:
        """Return the client of a server that runs; starts it if it does not.

        Raises ServerFailed.
        """
        if isinstance(self._target, UnusableServer):
            raise ServerFailed(self._target.reason)
        async with self._opening:
            if self._owner is None or self._owner.done() or self._gone.is_set():
                await self.leave()
                await self._open()
            return self._client

    async def leave(self) -> None:
        """Close the connection, and wait until it is closed."""
        if self._owner is not None:
            self._gone.set()
            await asyncio.wait({self._owner})

    async def _open(self) -> None:
        self._gone = asyncio.Event()
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(opened))
        either: set[asyncio.Future[Any]] = {opened, self._owner}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._owner.cancel()
            raise
        if not opened.done():
            self._owner.result()  # raises why
            raise ServerFailed("it ended while it was connected")
        self._client = opened.result()

    async def _own(self, opened: "asyncio.Future[Client]") -> None:
        """Hold the connection: its scopes must be left by the task that entered them."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
            errors = cast(TextIO, file)
            try:
                async with (
                    asyncio.timeout(_CONNECT_S) as connecting,
                    self._connect(errors) as client,
                ):
                    connecting.reschedule(None)
                    opened.set_result(client)
                    watching = asyncio.create_task(self._watch_list(client))
                    await self._gone.wait()
                    watching.cancel()
                    await asyncio.wait({watching})
            except Exception as error:
                self._gone.set()
                if not opened.done():
                    raise ServerFailed(_reason(error, errors)) from None

    @asynccontextmanager
    async def _connect(self, errors: TextIO) -> AsyncIterator[Client]:
        target: Any = self._target
        if isinstance(target, StdioServer):
            server = StdioServerParameters(
                command=target.command, args=target.args, env=target.env, cwd=target.cwd
            )
            transport = _watched(stdio_client(server, errlog=errors), self._gone)
            async with Client(transport, message_handler=self._on_message) as client:
                yield client
        elif isinstance(target, HttpServer):
            local = httpx2.URL(target.url).host in ("localhost", "127.0.0.1", "::1")
            async with httpx2.AsyncClient(
                headers=target.headers, timeout=_HTTP_TIMEOUT, trust_env=not local
            ) as http:
                transport = streamable_http_client(target.url, http_client=http)
                async with Client(transport, message_handler=self._on_message) as client:
                    yield client
        else:
            async with Client(target, message_handler=self._on_message) as client:
                yield client

    async def _on_message(self, message: object) -> None:
        if getattr(message, "method", None) == _LIST_CHANGED:
            self.list_changed = True

    async def _watch_list(self, client: Client) -> None:
        """Subscribe to changes where the protocol of the server wants that; others just tell."""
        with suppress(ListenNotSupportedError, SubscriptionLost, MCPError, TimeoutError, OSError):
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self.list_changed = True


@asynccontextmanager
async def _watched(
    transport: AbstractAsyncContextManager[tuple[Any, Any]], gone: asyncio.Event
) -> AsyncIterator[tuple[Any, Any]]:
    """Open a transport and set `gone` when nothing more can be read from it."""
    async with transport as (read, write):
        yield _Watched(read, gone), write


class _Watched:
    """A read stream that says when it is at its end."""

    def __init__(self, stream: Any, gone: asyncio.Event) -> None:
        self._stream = stream
        self._gone = gone

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> "_Watched":
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._gone.set()
            raise

    async def __aenter__(self) -> "_Watched":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _reason(error: BaseException, errors: TextIO) -> str:
    """Return why it failed: the innermost error, and the last that the server wrote of its own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        said = f"no answer within {_CONNECT_S:g} s"
    else:
        said = " ".join(str(error).split()) or type(error).__name__
    errors.seek(0)
    written = " ".join(errors.read()[-_REASON:].split())
    return f"{said}; it wrote: {written}" if written else said
