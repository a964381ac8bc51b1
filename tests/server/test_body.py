import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from live_server import serving
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve.server.answers import ErrorBoundary, json_response
from agentserve.server.body import read_body

LIMIT = 100_000


async def measure(request: Request) -> Response:
    return json_response({"bytes": len(await read_body(request, LIMIT, deadline_s=60))})


async def hurry(request: Request) -> Response:
    return json_response({"bytes": len(await read_body(request, LIMIT, deadline_s=0.1))})


@pytest.fixture(scope="module", params=["auto", "h11"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    app = Starlette(
        routes=[
            Route("/", measure, methods=["POST"]),
            Route("/hurry", hurry, methods=["POST"]),
        ],
        middleware=[Middleware(ErrorBoundary, count=lambda code: None)],
    )
    with serving(app, request.param) as number:
        yield number


def post(port: int, size: int, chunk: int | None) -> httpx.Response:
    data = b"x" * size
    pieces = data if chunk is None else (data[i : i + chunk] for i in range(0, size, chunk))
    return httpx.post(f"http://127.0.0.1:{port}/", content=pieces, timeout=30)


@pytest.mark.parametrize("chunk", [None, 1000, LIMIT])
def test_a_body_at_the_limit_is_taken(port: int, chunk: int | None) -> None:
    answer = post(port, LIMIT, chunk)
    assert answer.json() == {"bytes": LIMIT}


@pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT, 50 * LIMIT])
@pytest.mark.parametrize("chunk", [None, 4096])
def test_a_larger_body_is_refused_with_and_without_content_length(
    port: int, size: int, chunk: int | None
) -> None:
    try:
        answer = post(port, size, chunk)
    except httpx.TransportError:
        # The connection is closed on a sender that goes far beyond the limit.
        assert size > 2 * LIMIT
    else:
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert answer.json()["error"]["details"] == {"limit": LIMIT}
        assert answer.headers["connection"] == "close"
    assert post(port, 10, None).json() == {"bytes": 10}


def test_many_tiny_chunks_are_one_body(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        peer.sendall(head + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert read_answer(peer) == (200, {"bytes": 50_000})


def test_a_trickled_body_runs_into_the_deadline(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"POST /hurry HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        status, answer = read_answer(peer)
        assert status == 400
        assert answer["error"]["code"] == "invalid_request"
        assert "did not arrive" in answer["error"]["message"]
        assert peer.recv(1) == b""  # the rest of the body is not waited for


def test_a_client_that_leaves_inside_its_body_does_no_harm(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
    assert post(port, 10, None).json() == {"bytes": 10}


def read_answer(peer: socket.socket) -> tuple[int, dict]:
    peer.settimeout(30)
    stream = peer.makefile("rb")
    status = int(stream.readline().split()[1])
    headers = {}
    while (line := stream.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return status, json.loads(stream.read(int(headers[b"content-length"])))
