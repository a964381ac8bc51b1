"""Errors as each dialect has them, with a status on which its clients do the right thing.

Clients of these dialects try 408, 409, 429 and 5xx again. What another try cannot help is told with
a status that ends it.
"""

from typing import Any

from agentserve.errors import AgentserveError

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_PLAIN = (400, 401, 403, 404, 405, 413, 429, 500, 503)


def status(error: AgentserveError) -> int:
    """Return the status of an error: conflicts and refused contents are bad requests here."""
    if error.status in _PLAIN:
        return error.status
    return 400 if error.status < 500 else 500


def openai_error(error: AgentserveError) -> dict[str, Any]:
    """Return the body of an error for OpenAI's clients."""
    kind = "invalid_request_error" if status(error) < 500 else "server_error"
    code = "context_length_exceeded" if error.code == "context_full" else error.code
    if error.param == "previous_response_id":
        code = "previous_response_not_found"
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES.get(status(error), kind),
            "param": error.param,
            "code": code,
        }
    }


def anthropic_error(error: AgentserveError) -> dict[str, Any]:
    """Return the body of an error for Anthropic's clients."""
    kind = _ANTHROPIC_TYPES.get(
        status(error), "invalid_request_error" if status(error) < 500 else "api_error"
    )
    message = error.message
    if error.code == "context_full":  # by these words clients know that they must compact
        total = error.details.get("used", 0) + error.details.get("input", 0)
        message = f"prompt is too long: {total} tokens > {error.details.get('limit', 0)} maximum"
    elif error.param:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
