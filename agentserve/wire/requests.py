"""What clients send. Unknown fields are errors."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

# `\Z`, not `$`, which also matches before a newline at the end.
SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}\Z"
TOOL_NAME = r"^[A-Za-z0-9_-]{1,64}\Z"

SessionId = Annotated[str, Meta(pattern=SESSION_ID)]
CallId = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_CALLS = 1024  # that hints can name
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

    ref: Annotated[str, Meta(pattern=r"^t_[0-9]{1,9}(\.\.t_[0-9]{1,9})?\Z")]


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
    logprobs: Annotated[int, Meta(ge=0, le=20)] | UnsetType | None = UNSET  # null: none
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

    expected_ms: Millis | Annotated[dict[CallId, Millis], Meta(max_length=MAX_CALLS)] | None = None
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
