"""Between the items that clients send and see and the messages that a template renders."""

import json
from collections.abc import Callable, Iterable

from msgspec import UNSET

from agentserve.sessions.conversation import Call, Message
from agentserve.sessions.tree import Pending
from agentserve.wire import (
    AssistantItem,
    Item,
    MalformedToolCallOut,
    OutputItem,
    Reasoning,
    ReasoningOut,
    SystemItem,
    Text,
    TextOut,
    ToolCallOut,
    ToolResultItem,
    UserItem,
)

MintCall = Callable[[str | None], tuple[str, str]]  # a client's own id or None -> (wire, prompt) id


def plain_text(content: str | Iterable[Text]) -> str:
    """Return message content as one string."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def result_text(item: ToolResultItem) -> str:
    """Return what the model reads of a result: strings as given, other values as compact JSON."""
    if item.output is UNSET or item.output is None:
        if item.status == "cancelled":
            return f"[cancelled: {item.reason or 'no reason given'}]"
        return item.reason or ""
    if isinstance(item.output, str):
        return item.output
    return json.dumps(item.output, ensure_ascii=False, separators=(",", ":"))


def input_message(item: UserItem | SystemItem) -> Message:
    """Return the message of what a user or an operator said."""
    text = plain_text(item.content)
    return Message(role="user" if isinstance(item, UserItem) else "system", text=text)


def result_message(item: ToolResultItem, call: Pending) -> Message:
    """Return the message that answers `call`."""
    return Message(role="tool", text=result_text(item), call_id=call.prompt_id, name=call.name)


def assistant_message(
    item: AssistantItem, mint_call: MintCall, mint_item: Callable[[], str], now_ms: int
) -> tuple[Message, tuple[OutputItem, ...], tuple[Pending, ...]]:
    """Return foreign assistant content as a message, as output items, and the calls in it."""
    parts = [Text(item.content)] if isinstance(item.content, str) else item.content
    output: list[OutputItem] = []
    calls: list[Call] = []
    pending: list[Pending] = []
    for part in parts:
        if isinstance(part, Text):
            output.append(TextOut(mint_item(), part.text))
        elif isinstance(part, Reasoning):
            output.append(ReasoningOut(mint_item(), part.text))
        else:
            wire_id, prompt_id = mint_call(part.call_id)
            output.append(ToolCallOut(mint_item(), wire_id, part.name, part.arguments))
            calls.append(Call(prompt_id, part.name, part.arguments))
            pending.append(Pending(wire_id, part.name, prompt_id, now_ms))
    message = Message(
        role="assistant",
        text="".join(part.text for part in parts if isinstance(part, Text)),
        reasoning="".join(part.text for part in parts if isinstance(part, Reasoning)),
        calls=tuple(calls),
    )
    return message, tuple(output), tuple(pending)


def output_calls(
    output: Iterable[OutputItem], prompt_ids: dict[str, str], now_ms: int
) -> tuple[Pending, ...]:
    """Return the calls in `output` that await a result; malformed ones can be answered too."""
    return tuple(
        Pending(item.call_id, item.name or "", prompt_ids[item.call_id], now_ms)
        for item in output
        if isinstance(item, ToolCallOut | MalformedToolCallOut)
    )


def as_items(content: str | list[Item]) -> list[Item]:
    """Return turn input as items; a string is a user message."""
    return [UserItem(content)] if isinstance(content, str) else content
