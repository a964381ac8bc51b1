"""What users of the client hold in their hands: turns, calls, items and options."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import msgspec
from agentserve_tools import ToolOutput

from agentserve import wire

TranscriptFormat: TypeAlias = Literal["items", "openai", "anthropic", "tokens"]
Item: TypeAlias = wire.Item | Mapping[str, Any]


def user(text: str) -> wire.UserItem:
    """Return a user message."""
    return wire.UserItem(text)


def system(text: str) -> wire.SystemItem:
    """Return a system message for the middle of a conversation."""
    return wire.SystemItem(text)


class SessionOptions(TypedDict, total=False):
    """What a session is created with, beside its id and tools; see API.md, Create."""

    model: str
    system: str
    history: Sequence[Item]
    sampling: wire.Sampling | Mapping[str, Any]
    on_template_rewrite: Literal["recompute", "keep"]
    template_options: Mapping[str, bool | int | float | str | None]
    ttl_ms: int | None
    metadata: Mapping[str, Any]


class TurnOptions(TypedDict, total=False):
    """How one turn is generated; see API.md, Turn request."""

    max_output_tokens: int
    sampling: wire.Sampling | Mapping[str, Any]
    tool_choice: Literal["auto", "none", "required"] | wire.NamedTool | Mapping[str, Any]
    tools_allowed: Sequence[str]
    parallel_tool_calls: bool
    response_format: wire.ResponseFormat | Mapping[str, Any]
    on_pending: Literal["require", "cancel"]
    when_busy: Literal["reject", "queue", "interrupt"]
    on_disconnect: Literal["cancel", "continue"]
    hints: wire.Hints | Mapping[str, Any]
    metadata: Mapping[str, Any]
    debug: wire.Debug | Mapping[str, Any]


class HintOptions(TypedDict, total=False):
    """What the client knows about the wait that runs, or about the one after the running turn.

    expected_ms: how long the tools take from now, of all calls or of each by its id.
    resume_in_ms: when the next turn comes; its KV is brought back shortly before. kv: keep it on
    the `device` while there is room, make room now (`host`; `disk` is `host` today), or `drop` it.
    close: end the session once nothing is left to do. It stays; the others end with the wait.
    """

    expected_ms: int | Mapping[str, int]
    resume_in_ms: int
    kv: Literal["auto", "device", "host", "disk", "drop"]
    close: bool


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model wants made; answer it with `result`."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    schema_errors: list[str] = []

    def result(
        self,
        output: Any,
        *,
        status: Literal["ok", "error", "cancelled"] = "ok",
        duration_ms: int | None = None,
    ) -> wire.ToolResultItem:
        """Return the item that answers this call: text as it is, other values as JSON."""
        return wire.ToolResultItem(self.call_id, output, status, duration_ms=duration_ms)


class ToolStarted(msgspec.Struct, frozen=True):
    """`run` tells: a call begins."""

    call: ToolCall


class ToolDone(msgspec.Struct, frozen=True):
    """`run` tells: a call has ended, also when it failed or was not allowed."""

    call: ToolCall
    output: ToolOutput


class Turn:
    """One turn of the model; everything that the server said is in `wire`."""

    def __init__(self, turn: wire.Turn) -> None:
        self.wire = turn

    def __repr__(self) -> str:
        return f"<Turn {self.id} {self.status}/{self.stop_reason} of {self.wire.session}>"

    @property
    def id(self) -> str:
        """The turn's id in its session."""
        return self.wire.id

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and calls."""
        return "".join(item.text for item in self.output if isinstance(item, wire.TextOut))

    @property
    def reasoning(self) -> str:
        """The model's reasoning."""
        return "".join(item.text for item in self.output if isinstance(item, wire.ReasoningOut))

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls to make, in the model's order."""
        return [
            ToolCall(item.call_id, item.name, item.arguments, item.schema_errors)
            for item in self.output
            if isinstance(item, wire.ToolCallOut)
        ]

    @property
    def malformed_calls(self) -> list[wire.MalformedToolCallOut]:
        """What was meant as a call but cannot be read as one."""
        return [item for item in self.output if isinstance(item, wire.MalformedToolCallOut)]

    @property
    def output(self) -> list[wire.OutputItem]:
        """All items of the answer in order."""
        return self.wire.output

    @property
    def usage(self) -> wire.Usage:
        """Tokens of this turn."""
        return self.wire.usage

    @property
    def kv(self) -> wire.KvTokens:
        """The cached tokens by the tier that their KV was in when the turn began."""
        return self.wire.kv

    @property
    def context(self) -> wire.Context:
        """Tokens of the model's context after this turn."""
        return self.wire.context

    @property
    def timing_ms(self) -> wire.Timing:
        """Milliseconds by phase; `restore` is the wait for KV from the host tier."""
        return self.wire.timing_ms

    @property
    def status(self) -> str:
        """`completed`, `incomplete` or `cancelled`; a failed turn is raised as an exception."""
        return self.wire.status

    @property
    def stop_reason(self) -> str | None:
        """Why generation ended."""
        return self.wire.stop_reason

    @property
    def warnings(self) -> list[str]:
        """What the server found odd."""
        return self.wire.warnings
