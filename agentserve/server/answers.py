"""JSON answers, and the one path that every error takes to the client."""

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentserve import wire
from agentserve.dialects import errors
from agentserve.errors import (
    AgentserveError,
    EngineError,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `value` (a response struct or plain data) as a JSON answer."""
    return Response(wire.encode(value), status, headers, media_type="application/json")


def error_response(
    error: AgentserveError,
    headers: Mapping[str, str] | None = None,
    path: str = "",
    request_id: str = "",
) -> Response:
    """Render `error`, with the headers by which client libraries decide whether to try again.

    The request's path says in which dialect.
    """
    own = dict(headers or {})
    dialect = dialect_of(path)
    status = error.status if dialect is None else errors.status(error)
    if status in (429, 503):
        own["Retry-After"] = str(RETRY_AFTER_S)
    if status == 409 or (dialect is not None and status == 500):
        # Common client libraries retry these; ours need another request, not the same again.
        own["x-should-retry"] = "false"
    if error.status == 405:
        own["Allow"] = ", ".join(error.details.get("allowed", ()))
    if error.status == 401:
        own["WWW-Authenticate"] = "Bearer"
    if dialect is errors.anthropic_error:
        return json_response({**dialect(error), "request_id": request_id}, status, own)
    if dialect is not None:
        return json_response(dialect(error), status, own)
    return json_response(wire.ErrorAnswer(wire.error_body(error)), status, own)


def dialect_of(path: str) -> Callable[[AgentserveError], dict[str, Any]] | None:
    """Return how the dialect of a path has its errors; None for the native API."""
    return next((write for start, write in _DIALECTS.items() if path.startswith(start)), None)


_DIALECTS = {
    "/v1/messages": errors.anthropic_error,
    "/v1/chat/completions": errors.openai_error,
    "/v1/responses": errors.openai_error,
}


def unexpected() -> EngineError:
    """Return what a client is told of a fault in the server: nothing that the log should tell."""
    return EngineError("internal error; the server's log has the details")


async def http_exception(request: Request, error: Exception) -> Response:
    """Turn what the router itself refuses into an error of the catalogue, for the boundary."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        raise RouteNotFound(
            "no such path; GET /v1/models, POST /sessions and the others are listed in the README"
        )
    if error.status_code == 405:
        raise MethodNotAllowed(
            f"this path does not take {request.method}", allowed=_allowed_methods(request)
        )
    raise InvalidRequest("the request is not valid HTTP for this server")


def _allowed_methods(request: Request) -> list[str]:
    matching = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    return sorted({method for route in matching for method in route.methods or ()})


class ErrorBoundary:
    """ASGI middleware: whatever is raised below becomes an Error answer; `count` gets its code.

    Every answer has an id, by the names that clients of the dialects look for.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app below and render what it raises."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False
        unread = False
        request_id = f"req_{secrets.token_hex(12)}"

        async def watched_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                value = request_id.encode()
                names = ((b"x-request-id", value), (b"request-id", value))
                message = {**message, "headers": [*message["headers"], *names]}
            await send(message)

        async def watched_receive() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        try:
            await self._app(scope, watched_receive, watched_send)
        except ClientDisconnect:
            return
        except AgentserveError as error:
            failure = error
        except Exception:
            where = scope["method"], scope["path"], request_id
            logger.exception("unexpected error in %s %s, %s", *where)
            failure = unexpected()
        else:
            return
        self._count(failure.code)
        if not started:
            headers = {"Connection": "close"} if unread or failure.status == 413 else None
            answer = error_response(failure, headers, scope["path"], request_id)
            await answer(scope, receive, watched_send)
