"""The events of a streamed turn; exactly one turn.done or error ends each stream."""

import msgspec

from agentserve.wire.answers import (
    ErrorBody,
    OutputItem,
    Recomputed,
    Response,
    TokenLogprob,
    Turn,
)


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


class TextDelta(Response, tag="text.delta", omit_defaults=True):
    """More text of item `index`; `logprobs` of the tokens that were not shown in part before."""

    index: int
    delta: str
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


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
