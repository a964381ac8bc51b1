"""The in-process transport: streamed answers, seen disconnects, a real lifespan."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from agentserve.client.embedded import URL, AsyncTransport, Server, SyncTransport


class App:
    """A small app that records what happened to it."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.left = threading.Event()
        self.stopped = False
        self.asked = 0
        self.asgi = Starlette(
            routes=[
                Route("/echo/{word}", self.echo, methods=["POST"]),
                Route("/parts", self.parts),
                Route("/many", self.many),
                Route("/waits", self.waits),
                Route("/ready", self.ready),
                Route("/breaks", self.breaks),
                Route("/breaks_late", self.breaks_late),
            ],
            lifespan=self.lifespan,
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app):
        yield {"started": "yes"}
        self.stopped = True

    async def echo(self, request: Request) -> JSONResponse:
        body = await request.body()
        return JSONResponse(
            {
                "word": request.path_params["word"],
                "q": request.query_params["q"],
                "key": request.headers["x-key"],
                "body": body.decode(),
                "started": request.state.started,
            },
            status_code=201,
        )

    async def parts(self, request: Request) -> StreamingResponse:
        async def body():
            yield b"one"
            await asyncio.to_thread(self.go_on.wait, 10)
            yield b"two"

        return StreamingResponse(body())

    async def many(self, request: Request) -> StreamingResponse:
        async def body():
            for number in range(1000):
                yield b"%d," % number

        return StreamingResponse(body())

    async def waits(self, request: Request) -> StreamingResponse:
        async def body():
            yield b"first"
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.left.set()

        return StreamingResponse(body())

    async def ready(self, request: Request) -> JSONResponse:
        self.asked += 1
        return JSONResponse({"asked": self.asked}, status_code=200 if self.asked == 3 else 503)

    async def breaks(self, request: Request) -> JSONResponse:
        raise ZeroDivisionError("broken")

    async def breaks_late(self, request: Request) -> StreamingResponse:
        async def body():
            yield b"half"
            raise ZeroDivisionError("broken")

        return StreamingResponse(body())


@pytest.fixture
def app():
    return App()


@pytest.fixture
def client(app) -> Iterator[httpx.Client]:
    with httpx.Client(transport=SyncTransport(Server(app.asgi)), base_url=URL) as client:
        yield client


def test_a_request_arrives_whole(client):
    answer = client.post("/echo/a%20b", params={"q": "x y"}, headers={"X-Key": "k"}, content="hé")
    assert answer.status_code == 201
    expected = {"word": "a b", "q": "x y", "key": "k", "body": "hé", "started": "yes"}
    assert answer.json() == expected


def test_a_body_streams_while_the_app_still_runs(app, client):
    with client.stream("GET", "/parts") as answer:
        parts = answer.iter_bytes()
        assert next(parts) == b"one"
        app.go_on.set()
        assert list(parts) == [b"two"]


def test_a_body_longer_than_the_buffer_arrives_in_order(client):
    assert client.get("/many").text == "".join(f"{n}," for n in range(1000))


def test_leaving_early_is_a_disconnect_that_the_app_sees(app, client):
    with client.stream("GET", "/waits") as answer:
        assert next(answer.iter_bytes()) == b"first"
    assert app.left.wait(10)


def test_leaving_a_sender_that_waits_for_room_ends_it(client):
    with client.stream("GET", "/many") as answer:
        next(answer.iter_bytes())
    assert client.get("/many").is_success


@pytest.mark.parametrize("path", ["/breaks", "/breaks_late"])
def test_a_fault_of_the_app_is_raised(client, path):
    with pytest.raises(ZeroDivisionError):
        client.get(path)


def test_closing_the_client_runs_the_shutdown_once(app):
    server = Server(app.asgi)
    client = httpx.Client(transport=SyncTransport(server), base_url=URL)
    assert not app.stopped
    client.close()
    assert app.stopped
    server.close()


def test_a_server_is_asked_until_it_is_ready(app):
    server = Server(app.asgi)
    server.submit(server.until_ready(10)).result()
    assert app.asked == 3
    with pytest.raises(RuntimeError, match=r'not ready: \{"asked":4\}'):
        server.submit(server.until_ready(0)).result()
    server.close()


def test_an_app_that_cannot_start_says_why():
    @contextlib.asynccontextmanager
    async def lifespan(app):
        raise RuntimeError("no such model")
        yield

    with pytest.raises(RuntimeError, match="no such model"):
        Server(Starlette(lifespan=lifespan))


def test_an_app_without_lifespan_is_refused():
    async def app(scope, receive, send):
        return

    with pytest.raises(RuntimeError, match="ended without an answer"):
        Server(app)


async def test_the_async_transport_streams_and_disconnects_too(app):
    async with httpx.AsyncClient(
        transport=AsyncTransport(Server(app.asgi)), base_url=URL
    ) as client:
        assert (await client.get("/many")).text.endswith("999,")
        async with client.stream("GET", "/waits") as answer:
            assert await anext(answer.aiter_bytes()) == b"first"
        assert await asyncio.to_thread(app.left.wait, 10)
    assert app.stopped


async def test_cancelling_an_async_request_is_a_disconnect(app):
    async with httpx.AsyncClient(
        transport=AsyncTransport(Server(app.asgi)), base_url=URL
    ) as client:
        task = asyncio.create_task(client.get("/waits"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(app.left.wait, 10)
