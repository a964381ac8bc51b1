"""The closed catalogue of errors that a client can see.

AgentserveError
 +- InvalidRequest 400     BadToolSchema 400     ContextFull 400     ExceedsKvCapacity 400
 +- Unauthorized 401       Forbidden 403
 +- SessionNotFound 404    TurnNotFound 404      ModelNotFound 404   RouteNotFound 404
 +- MethodNotAllowed 405
 +- SessionBusy 409        HeadMoved 409         SessionExists 409   ToolResultsMissing 409
 +- SessionClosed 410
 +- BodyTooLarge 413
 +- UnknownCallId 422      ResultConflict 422    IdempotencyMismatch 422
 +- Overloaded 429         QuotaExceeded 429
 +- EngineError 500
 +- Draining 503           ModelLoading 503      EngineDown 503
 +- StoreFull 507

The server renders these as API.md's Error shape; the client raises the same classes again.
"""

from typing import Any, ClassVar


class AgentserveError(Exception):
    """An error with a stable code, an HTTP status and a message that says what to do."""

    code: ClassVar[str] = "engine_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details: dict[str, Any] = details


class InvalidRequest(AgentserveError):
    """The request does not have the documented shape or values."""

    code, status = "invalid_request", 400


class BadToolSchema(AgentserveError):
    """A tool's JSON schema is not one that the server can use."""

    code, status = "bad_tool_schema", 400


class ContextFull(AgentserveError):
    """The input does not fit what is left of the model's context."""

    code, status = "context_full", 400


class ExceedsKvCapacity(AgentserveError):
    """The input fits the model but can never fit this server's KV memory."""

    code, status = "exceeds_kv_capacity", 400


class Unauthorized(AgentserveError):
    """No valid API key was sent."""

    code, status = "unauthorized", 401


class Forbidden(AgentserveError):
    """The key is valid but may not do this."""

    code, status = "forbidden", 403


class SessionNotFound(AgentserveError):
    """No session of this principal has that id."""

    code, status = "session_not_found", 404


class TurnNotFound(AgentserveError):
    """The session has no such turn."""

    code, status = "turn_not_found", 404


class ModelNotFound(AgentserveError):
    """The server does not serve a model of that name."""

    code, status = "model_not_found", 404


class RouteNotFound(AgentserveError):
    """No such path."""

    code, status = "route_not_found", 404


class MethodNotAllowed(AgentserveError):
    """The path exists, but not for this verb."""

    code, status = "method_not_allowed", 405


class SessionBusy(AgentserveError):
    """A turn of this session is running."""

    code, status = "session_busy", 409


class HeadMoved(AgentserveError):
    """The session's head is not the one that the request was built on."""

    code, status = "head_moved", 409


class SessionExists(AgentserveError):
    """A session with this id was created with another body."""

    code, status = "session_exists", 409


class ToolResultsMissing(AgentserveError):
    """Calls are still waiting for their results."""

    code, status = "tool_results_missing", 409


class SessionClosed(AgentserveError):
    """The session was deleted."""

    code, status = "session_closed", 410


class BodyTooLarge(AgentserveError):
    """The request body is larger than the server takes."""

    code, status = "body_too_large", 413


class UnknownCallId(AgentserveError):
    """A result names a call that is not pending in this session."""

    code, status = "unknown_call_id", 422


class ResultConflict(AgentserveError):
    """Another result was already staged for this call."""

    code, status = "result_conflict", 422


class IdempotencyMismatch(AgentserveError):
    """The idempotency key was used before with another body."""

    code, status = "idempotency_mismatch", 422


class Overloaded(AgentserveError):
    """The queue is full; try again later."""

    code, status, retryable = "overloaded", 429, True


class QuotaExceeded(AgentserveError):
    """A limit of this principal is reached."""

    code, status, retryable = "quota_exceeded", 429, True


class EngineError(AgentserveError):
    """The engine failed this turn."""

    code, status = "engine_error", 500


class Draining(AgentserveError):
    """The server is shutting down and takes no new turns."""

    code, status, retryable = "draining", 503, True


class ModelLoading(AgentserveError):
    """The model is still being loaded."""

    code, status, retryable = "model_loading", 503, True


class EngineDown(AgentserveError):
    """The engine process, or its grammar compiler, is gone; it is being restarted."""

    code, status, retryable = "engine_down", 503, True


class StoreFull(AgentserveError):
    """The session store has no room left."""

    code, status = "store_full", 507


def _catalogue() -> dict[str, type[AgentserveError]]:
    return {cls.code: cls for cls in AgentserveError.__subclasses__()}


CATALOGUE: dict[str, type[AgentserveError]] = _catalogue()
