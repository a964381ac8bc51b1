"""Every shape of the native HTTP API (API.md): JSON is parsed here, once, and nowhere else.

Requests refuse unknown fields. Times are integer milliseconds.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from agentserve.errors import InvalidRequest

SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
TOOL_NAME = r"^[A-Za-z0-9_-]{1,64}$"

SessionId = Annotated[str, Meta(pattern=SESSION_ID)]
CallId = Annotated[str, Meta(min_length=1, max_length=64)]
Millis = Annotated[int, Meta(ge=0, le=10**12)]
Metadata = dict[str, Any]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything that a client sends."""


class Text(Request, frozen=True, tag="text"):
    """A piece of text inside user or assistant content."""

    text: str


class Reasoning(Request, frozen=True, tag="reasoning"):
    """A model's reasoning inside imported assistant content."""

    text: str


class ToolCall(Request, frozen=True, tag="tool_call"):
    """A tool call inside imported assistant content."""

    name: Annotated[str, Meta(pattern=TOOL_NAME)]
    arguments: dict[str, Any]
    call_id: CallId | None = None


AssistantPart = Text | Reasoning | ToolCall


class UserItem(Request, frozen=True, tag="user"):
    """A user message."""

    content: str | list[Text]


class SystemItem(Request, frozen=True, tag="system"):
    """A system message inside the conversation."""

    content: str | list[Text]


class AssistantItem(Request, frozen=True, tag="assistant"):
    """An assistant message that this server did not generate."""

    content: str | list[AssistantPart]


class ToolResultItem(Request, frozen=True, tag="tool_result"):
    """What a tool gave back for one call."""

    call_id: CallId
    output: Any = UNSET
    status: Literal["ok", "error", "cancelled"] = "ok"
    reason: Annotated[str, Meta(max_length=1000)] | None = None
    duration_ms: Millis | None = None


class RefItem(Request, frozen=True, tag="ref"):
    """Turns of this session that stay as they are: "t_4" or "t_1..t_4" (history only)."""

    ref: Annotated[str, Meta(pattern=r"^t_[0-9]{1,9}(\.\.t_[0-9]{1,9})?$")]


Item = UserItem | SystemItem | AssistantItem | ToolResultItem
HistoryItem = Item | RefItem


class Sampling(Request, frozen=True, omit_defaults=True):
    """Sampling parameters; a field left out keeps the session's, then the default (greedy)."""

    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=0, le=10**6)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | UnsetType = UNSET
    presence_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | UnsetType = UNSET
    frequency_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | UnsetType = UNSET
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | UnsetType = UNSET
    stop: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)]
        | UnsetType
    ) = UNSET


class Tool(Request, frozen=True, tag="function", omit_defaults=True):
    """A tool that the model may call. It runs in the client's process, never in the server."""

    name: Annotated[str, Meta(pattern=TOOL_NAME)]
    parameters: dict[str, Any]
    description: Annotated[str, Meta(max_length=16384)] = ""
    strict: bool = False
    read_only: bool = False
    examples: Annotated[list[Any], Meta(max_length=16)] = []
    expected_ms: Millis | None = None


class Hints(Request, frozen=True, omit_defaults=True):
    """What the client knows about the wait that begins after this turn."""

    expected_ms: Millis | dict[CallId, Millis] | None = None
    resume_in_ms: Millis | None = None
    kv: Literal["auto", "device", "host", "disk", "drop"] = "auto"
    close: bool = False


class CreateRequest(Request, frozen=True):
    """POST /sessions."""

    id: SessionId | None = None
    model: str | None = None
    system: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    history: list[Item] = []
    sampling: Sampling = Sampling()
    on_template_rewrite: Literal["recompute", "keep"] = "recompute"
    template_options: dict[str, bool | int | float | str | None] = {}
    ttl_ms: Millis | None = None
    metadata: Metadata = {}


class PatchRequest(Request, frozen=True):
    """PATCH /sessions/{id}; a field left out stays as it is."""

    metadata: Metadata | UnsetType = UNSET
    ttl_ms: Millis | UnsetType | None = UNSET
    tools: Annotated[list[Tool], Meta(max_length=128)] | UnsetType = UNSET


class NamedTool(Request, frozen=True):
    """tool_choice that names one tool."""

    name: Annotated[str, Meta(pattern=TOOL_NAME)]


class ResponseFormat(Request, frozen=True):
    """A JSON schema that the answer must satisfy."""

    type: Literal["text", "json_schema"]
    schema: dict[str, Any] | None = None


class Debug(Request, frozen=True):
    """Replay only (`serve --allow-force`): the output that is decoded as if sampled."""

    force: list[Text | ToolCall]


class TurnRequest(Request, frozen=True):
    """POST /sessions/{id}/turn."""

    input: str | list[Item]
    expect_head: str | UnsetType | None = UNSET
    stream: bool = False
    max_output_tokens: Annotated[int, Meta(ge=0, le=10**7)] | None = None
    sampling: Sampling = Sampling()
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    tools_allowed: list[str] | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    on_pending: Literal["require", "cancel"] = "require"
    when_busy: Literal["reject", "queue", "interrupt"] = "reject"
    on_disconnect: Literal["cancel", "continue"] = "cancel"
    hints: Hints | None = None
    metadata: Metadata = {}
    debug: Debug | None = None


class ToolResultsRequest(Request, frozen=True):
    """POST /sessions/{id}/tool_results."""

    results: Annotated[list[ToolResultItem], Meta(min_length=1, max_length=1024)]


class ForkRequest(Request, frozen=True):
    """POST /sessions/{id}/fork."""

    at: str | None = None
    id: SessionId | None = None
    n: Annotated[int, Meta(ge=1, le=64)] = 1
    tools_allowed: list[str] | None = None


class RollbackRequest(Request, frozen=True):
    """POST /sessions/{id}/rollback: exactly one of `to` and `before`."""

    to: str | None = None
    before: str | None = None
    expect_head: str | UnsetType | None = UNSET


class HistoryRequest(Request, frozen=True):
    """PUT /sessions/{id}/history."""

    items: list[HistoryItem]
    expect_head: str | UnsetType | None = UNSET
    prefill: bool = False


class CountRequest(Request, frozen=True):
    """POST /sessions/{id}/count."""

    input: str | list[Item]


class CancelRequest(Request, frozen=True):
    """POST /sessions/{id}/cancel."""

    turn: str | None = None
    keep: Literal["none", "input", "partial"] = "none"


class Response(msgspec.Struct):
    """Base of everything that the server answers; clients of an older version ignore new fields."""


class TextOut(Response, tag="text"):
    """Text of the model."""

    id: str
    text: str


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
    """Tokens of one turn. computed by prefill = input_tokens - cached_tokens."""

    input_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    recomputed: list[Recomputed] = []
    output_tokens: int = 0
    reasoning_tokens: int = 0


class KvTokens(Response):
    """Tokens by the tier that their KV is (or came from) in."""

    device: int = 0
    host: int = 0
    disk: int = 0


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


class TurnQueued(Response, tag="turn.queued"):
    """The turn waits for its place."""

    position: int


class TurnStarted(Response, tag="turn.started"):
    """The turn was admitted."""

    cached_tokens: int
    new_tokens: int
    recomputed: list[Recomputed]


class TurnProgress(Response, tag="turn.progress"):
    """Prefill advanced."""

    phase: str
    done: int
    total: int


class ItemStarted(Response, tag="item.started"):
    """An output item began; of a tool call only the name is known."""

    index: int
    item: OutputItem


class TextDelta(Response, tag="text.delta"):
    """More text of item `index`."""

    index: int
    delta: str


class ReasoningDelta(Response, tag="reasoning.delta"):
    """More reasoning of item `index`."""

    index: int
    delta: str


class ToolCallDelta(Response, tag="tool_call.delta"):
    """The next fragment of the final arguments JSON of item `index`."""

    index: int
    delta: str


class ItemDone(Response, tag="item.done"):
    """Item `index` is final; sent as soon as a call's arguments close."""

    index: int
    item: OutputItem


class TurnDone(Response, tag="turn.done"):
    """The turn ended; nothing follows."""

    turn: Turn


class ErrorEvent(Response, tag="error"):
    """The turn failed before it could commit; nothing follows."""

    error: ErrorBody


Event = (
    TurnQueued
    | TurnStarted
    | TurnProgress
    | ItemStarted
    | TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | ItemDone
    | TurnDone
    | ErrorEvent
)

T = TypeVar("T")


def decode(body: bytes, shape: type[T]) -> T:
    """Parse a JSON request body as `shape`.

    Raises InvalidRequest with the JSON path (as `param`) of what does not fit.
    """
    try:
        if shape is HistoryRequest:
            return msgspec.convert(_tag_refs(msgspec.json.decode(body)), shape)
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the body is not valid JSON") from None


def decode_query(pairs: list[tuple[str, str]], shape: type[T]) -> T:
    """Parse the parameters of a query string as `shape`.

    Raises InvalidRequest with the parameter that does not fit or is given twice.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        raise InvalidRequest("a query parameter is given twice")
    try:
        return msgspec.convert(values, shape, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    message, _, path = str(error).partition(" - at `")
    return InvalidRequest(message, param=path.rstrip("`") or None)


def _tag_refs(body: Any) -> Any:
    """Give `{ref: ...}` items, which carry no type on the wire, their tag."""
    if isinstance(body, dict) and isinstance(body.get("items"), list):
        for item in body["items"]:
            if isinstance(item, dict) and set(item) == {"ref"}:
                item["type"] = "ref"
    return body


def encode(value: Any) -> bytes:
    """Return the JSON of a response."""
    return msgspec.json.encode(value)
