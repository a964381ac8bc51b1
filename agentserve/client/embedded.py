"""A server in this process: the same ASGI app, reached without a socket.

The app runs in a background event loop. Unlike httpx.ASGITransport, which collects the whole body
first, an answer is streamed, and closing it early is a disconnect that the app sees.
"""

import asyncio
import atexit
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
from agentserve_tools.background import BackgroundLoop

URL = "http://127.0.0.1"
_BUFFERED_CHUNKS = 64
_READY_POLL_S = 0.02

Message: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


def start(model: str, settings: dict[str, Any], load_timeout_s: float = 600.0) -> "Server":
    """Build the server for `model` and wait until it is loaded.

    Raises RuntimeError with the reason when it is not after `load_timeout_s`.
    """
    from agentserve import assembly

    server = Server(assembly.build_app(model, in_process=True, **settings))
    try:
        server.submit(server.until_ready(load_timeout_s)).result()
    except BaseException:
        server.close()
        raise
    return server


class Server:
    """An ASGI app that runs in a background loop, between its startup and its shutdown."""

    def __init__(self, app: App) -> None:
        """Run the app's startup; raises RuntimeError when that fails."""
        self._loop = BackgroundLoop("agentserve embedded server")
        self.submit = self._loop.submit
        self.app = app
        self.lifespan = Lifespan(app)
        try:
            self.submit(self.lifespan.startup()).result()
        except BaseException:
            self._loop.close()
            raise
        self._open = True
        atexit.register(self.close)

    def exchange(self, request: httpx.Request, body: bytes) -> "Exchange":
        """Return a request that is ready to be started."""
        return Exchange(self.app, _scope(request, self.lifespan.state), body)

    async def until_ready(self, timeout_s: float) -> None:
        """Ask /ready until it agrees. Raises RuntimeError with its last answer."""
        give_up = asyncio.get_running_loop().time() + timeout_s
        while True:
            exchange = self.exchange(httpx.Request("GET", f"{URL}/ready"), b"")
            head = await exchange.start()
            answer = await exchange.chunk()
            await exchange.close()
            if head.status == 200:
                return
            if asyncio.get_running_loop().time() > give_up:
                raise RuntimeError(f"the model is not ready: {answer.decode()}")
            await asyncio.sleep(_READY_POLL_S)

    def close(self) -> None:
        """Run the app's shutdown and end the loop."""
        if self._open:
            self._open = False
            atexit.unregister(self.close)
            self.submit(self.lifespan.shutdown()).result()
            self._loop.close()


class Lifespan:
    """The ASGI lifespan protocol from the server's side."""

    def __init__(self, app: App) -> None:
        self.state: dict[str, Any] = {}
        self._app = app

    async def startup(self) -> None:
        """Start the app. Raises RuntimeError with its reason when it refuses."""
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self.state}
        self._task = asyncio.ensure_future(self._app(scope, self._inbox.get, self._outbox.put))
        await self._tell("lifespan.startup")

    async def shutdown(self) -> None:
        """Stop the app and wait for it."""
        await self._tell("lifespan.shutdown")
        await self._task

    async def _tell(self, what: str) -> None:
        await self._inbox.put({"type": what})
        answer = asyncio.ensure_future(self._outbox.get())
        await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            self._task.result()
            raise RuntimeError(f"the app ended without an answer to {what}")
        if answer.result()["type"] != f"{what}.complete":
            await asyncio.wait({self._task})
            raise RuntimeError(answer.result().get("message") or f"{what} failed")


@dataclass(frozen=True)
class Head:
    """The beginning of an answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Exchange:
    """One request to the app and its answer, in the app's loop."""

    def __init__(self, app: App, scope: Message, body: bytes) -> None:
        self._app = app
        self._scope = scope
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def start(self) -> Head:
        """Run the app and return the head of its answer; raises what the app raises before that."""
        self._gone = asyncio.Event()
        self._head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(_BUFFERED_CHUNKS)
        self._task = asyncio.ensure_future(self._run())
        either: set[asyncio.Future[Any]] = {self._head, self._task}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        if not self._head.done():
            self._task.result()
            raise httpx.RemoteProtocolError("the app answered nothing")
        return self._head.result()

    async def chunk(self) -> bytes:
        """Return more of the body, b"" at its end; raises what the app raised."""
        chunk = await self._chunks.get()
        if not chunk:
            await self._task
        return chunk

    async def close(self) -> None:
        """Leave: the app is told that the client is gone."""
        self._gone.set()
        while not self._chunks.empty():  # a send that waits for room goes on and sees it
            self._chunks.get_nowait()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            if not self._gone.is_set():
                await self._chunks.put(b"")

    async def _receive(self) -> Message:
        if self._request:
            return self._request.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            raise OSError("the client is gone")
        if message["type"] == "http.response.start":
            self._head.set_result(Head(message["status"], list(message.get("headers", ()))))
        elif body := message.get("body"):
            await self._chunks.put(body)


def _scope(request: httpx.Request, state: dict[str, Any]) -> Message:
    path, _, query = request.url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 0),
        "server": (request.url.host, request.url.port or 80),
        "state": state.copy(),
    }


class _SyncBody(httpx.SyncByteStream):
    def __init__(self, server: Server, exchange: Exchange) -> None:
        self._server = server
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self._server.submit(self._exchange.chunk()).result():
            yield chunk

    def close(self) -> None:
        self._server.submit(self._exchange.close()).result()


class SyncTransport(httpx.BaseTransport):
    """Sends the requests of an httpx.Client to an embedded server, which it owns."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer with a body that streams."""
        exchange = self._server.exchange(request, request.read())
        starting = self._server.submit(exchange.start())
        try:
            head = starting.result()
        except BaseException:
            starting.cancel()
            raise
        body = _SyncBody(self._server, exchange)
        return httpx.Response(head.status, headers=head.headers, stream=body)

    def close(self) -> None:
        """End the server."""
        self._server.close()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, server: Server, exchange: Exchange) -> None:
        self._server = server
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await asyncio.wrap_future(self._server.submit(self._exchange.chunk())):
            yield chunk

    async def aclose(self) -> None:
        await asyncio.wrap_future(self._server.submit(self._exchange.close()))


class AsyncTransport(httpx.AsyncBaseTransport):
    """Sends the requests of an httpx.AsyncClient to an embedded server, which it owns."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer with a body that streams."""
        exchange = self._server.exchange(request, await request.aread())
        head = await asyncio.wrap_future(self._server.submit(exchange.start()))
        body = _AsyncBody(self._server, exchange)
        return httpx.Response(head.status, headers=head.headers, stream=body)

    async def aclose(self) -> None:
        """End the server."""
        await asyncio.to_thread(self._server.close)
