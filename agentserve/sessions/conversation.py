"""What a chat template renders, as the sessions keep it."""

from typing import Any, Literal

import msgspec

from agentserve import wire


class Call(msgspec.Struct, frozen=True):
    """A tool call of an assistant message; `call_id` is the id that the template prints."""

    call_id: str
    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True):
    """One message.

    With `ids` (packed, as generated) an assistant message is spliced and never encoded again;
    what follows its reasoning begins at ids[body_start]. `tail` is the text of a token that a stop
    string split; it follows the ids. An `open` message is last and will be continued.
    A tool message answers the call `call_id` of the tool `name`.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""
    ids: bytes | None = None
    body_start: int = 0
    tail: str = ""
    open: bool = False


class Conversation(msgspec.Struct, frozen=True):
    """Messages (a leading system message is messages[0]) with what the template depends on.

    `options` are extra template variables; `now` is the Unix time that the template sees, frozen
    when the session is created.
    """

    messages: tuple[Message, ...]
    tools: tuple[wire.Tool, ...] = ()
    options: dict[str, Any] = {}
    now: float = 0.0
