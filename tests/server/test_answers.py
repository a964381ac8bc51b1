import json
import logging
import subprocess
import sys

import httpx
import pytest
from live_server import serving
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentserve.errors import CATALOGUE, AgentserveError
from agentserve.server.answers import ErrorBoundary, error_response, http_exception


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_error_of_the_catalogue_is_rendered(code: str) -> None:
    error = CATALOGUE[code]("what to do", param="$.x", limit=5)
    answer = error_response(error)
    assert answer.status_code == error.status
    assert json.loads(answer.body) == {
        "error": {
            "code": code,
            "message": "what to do",
            "retryable": error.retryable,
            "param": "$.x",
            "details": {"limit": 5},
        }
    }
    assert ("retry-after" in answer.headers) is error.retryable
    assert (answer.headers.get("x-should-retry") == "false") is (error.status == 409)


def test_only_overload_and_unavailability_are_retryable() -> None:
    statuses = {error.status for error in CATALOGUE.values() if error.retryable}
    assert statuses == {429, 503}


def test_an_unexpected_error_is_logged_and_tells_the_client_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: Request) -> Response:
        raise KeyError("/home/someone/secret.py")

    counted: list[str] = []
    app = Starlette(
        routes=[Route("/", fail)], middleware=[Middleware(ErrorBoundary, count=counted.append)]
    )
    with caplog.at_level(logging.ERROR), serving(app) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error"
        assert "secret" not in answer.text
        assert "KeyError" not in answer.text
    assert counted == ["engine_error"]
    assert "secret.py" in caplog.text
    assert "Traceback" in caplog.text


def test_an_error_after_the_head_was_sent_ends_the_connection() -> None:
    async def broken() -> object:
        yield b"half"
        raise AgentserveError("late")

    async def answer(request: Request) -> Response:
        return StreamingResponse(broken())

    app = Starlette(
        routes=[Route("/", answer)], middleware=[Middleware(ErrorBoundary, count=lambda code: None)]
    )
    with serving(app) as port, pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(("status", "code"), [(404, 404), (405, 405), (400, 400), (418, 400)])
async def test_what_the_router_raises_becomes_an_error_of_the_catalogue(
    status: int, code: int
) -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "app": Starlette()}
    request = Request(scope)
    with pytest.raises(AgentserveError) as raised:
        await http_exception(request, HTTPException(status))
    assert raised.value.status == code
    assert raised.value.code in CATALOGUE


def test_the_server_process_never_imports_torch() -> None:
    code = "import sys, agentserve.server.app; print(sorted({'torch', 'numba'} & {*sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert loaded.stdout == b"[]\n"
