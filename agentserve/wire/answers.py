"""What the server answers; clients of an older version ignore new fields."""

from typing import Any, Literal

import msgspec

from agentserve.errors import AgentserveError
from agentserve.wire.requests import Metadata


class Response(msgspec.Struct):
    """Base of everything that the server answers; clients of an older version ignore new fields."""


class TopLogprob(Response, gc=False):
    """A token that was possible at a place, as text and as bytes, and its log probability.

    Bytes that are no UTF-8 on their own are escaped in the text, as Python does.
    """

    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """A token of the text; `top` are the likeliest at its place, the likeliest first."""

    top: list[TopLogprob] = []


class TextOut(Response, tag="text", omit_defaults=True):
    """Text of the model; `logprobs` of the tokens of which any part is shown, if asked for."""

    id: str
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningOut(Response, tag="reasoning"):
    """Reasoning of the model."""

    id: str
    text: str


class ToolCallOut(Response, tag="tool_call", omit_defaults=True):
    """A tool call; `schema_errors` is there when the arguments break the tool's schema."""

    id: str
    call_id: str
    name: str
    arguments: dict[str, Any]
    schema_errors: list[str] = []


class MalformedToolCallOut(Response, tag="malformed_tool_call"):
    """Text that was meant as a call but cannot be read as one; it can be answered by call_id."""

    id: str
    call_id: str
    raw: str
    error: str
    name: str | None = None


OutputItem = TextOut | ReasoningOut | ToolCallOut | MalformedToolCallOut


class PendingCall(Response):
    """A call that has no result yet."""

    call_id: str
    name: str
    since_ms: int


class Recomputed(Response):
    """Tokens that were computed although their KV had been computed before."""

    tokens: int
    reason: str


class Usage(Response):
    """Tokens of one turn. computed by prefill = input_tokens - cached_tokens.

    `prepared_tokens` of the cached ones were computed while the session waited for the user: the
    template had displaced them.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    recomputed: list[Recomputed] = []
    output_tokens: int = 0
    reasoning_tokens: int = 0
    prepared_tokens: int = 0


class KvTokens(Response):
    """Tokens by the tier that their KV is (or came from) in."""

    device: int = 0
    host: int = 0
    disk: int = 0


class Residency(Response):
    """What was moved between tiers for a session since its engine has known it."""

    saved_bytes: int = 0
    loaded_bytes: int = 0
    stall_ms: int = 0


class Timing(Response):
    """Milliseconds that a turn spent in each phase."""

    queue: int = 0
    restore: int = 0
    prefill: int = 0
    decode: int = 0
    ttft: int = 0
    total: int = 0


class Context(Response):
    """Tokens of the model's context."""

    used: int
    limit: int
    left: int


class Turn(Response):
    """One turn."""

    id: str
    session: str
    previous: str | None
    status: Literal["completed", "incomplete", "cancelled", "failed", "running", "queued"]
    context: Context
    stop_reason: (
        Literal[
            "end",
            "tool_calls",
            "max_tokens",
            "stop_sequence",
            "cancelled",
            "context_full",
            "failed_after_calls",
        ]
        | None
    ) = None
    output: list[OutputItem] = []
    pending_calls: list[PendingCall] = []
    usage: Usage = msgspec.field(default_factory=Usage)
    kv: KvTokens = msgspec.field(default_factory=KvTokens)
    timing_ms: Timing = msgspec.field(default_factory=Timing)
    warnings: list[str] = []
    metadata: Metadata = {}
    error: "ErrorBody | None" = None


class SessionInfo(Response):
    """One session."""

    id: str
    state: Literal["idle", "queued", "running", "awaiting_tools", "closed"]
    head: str | None
    turns: int
    model: str
    created_at: int
    last_active_at: int
    expires_at: int | None
    pending_calls: list[PendingCall]
    context: Context
    kv: KvTokens
    usage: Usage
    metadata: Metadata
    residency: Residency = msgspec.field(default_factory=Residency)


class SessionList(Response):
    """GET /sessions."""

    sessions: list[SessionInfo]
    next: str | None = None


class TurnList(Response):
    """GET /sessions/{id}/turns: the turns from the first to the head."""

    turns: list[Turn]


class ToolResultsAnswer(Response):
    """Answer to tool_results."""

    pending_calls: list[PendingCall]
    staged: list[str]
    prefilled_tokens: int


class ForkAnswer(Response):
    """Answer to fork."""

    sessions: list[SessionInfo]


class HeadAnswer(Response):
    """Answer to rollback, history and PATCH."""

    head: str | None
    kept_tokens: int
    new_tokens: int
    recomputed: list[Recomputed]


class CountAnswer(Response):
    """Answer to count."""

    input_tokens: int
    new_tokens: int
    context: Context


class ErrorBody(Response, omit_defaults=True):
    """What went wrong and what to do about it."""

    code: str
    message: str
    retryable: bool
    param: str | None = None
    details: dict[str, Any] = {}


class ErrorAnswer(Response):
    """The body of every answer that is not 2xx."""

    error: ErrorBody


def error_body(error: AgentserveError) -> ErrorBody:
    """Return an error as clients see it."""
    return ErrorBody(error.code, error.message, error.retryable, error.param, error.details)
