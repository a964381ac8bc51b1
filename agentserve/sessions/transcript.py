"""A session's history in the formats that other programs read."""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from agentserve.errors import InvalidRequest
from agentserve.sessions.items import plain_text, result_text
from agentserve.sessions.session import Session
from agentserve.sessions.tree import Entry
from agentserve.wire import (
    Item,
    MalformedToolCallOut,
    OutputItem,
    SystemItem,
    TextOut,
    ToolCallOut,
    ToolResultItem,
    UserItem,
)

Answer = dict[str, Any] | list[Any]


def transcript(session: Session, style: str) -> Answer:
    """Return the head's history as items | openai | anthropic | tokens.

    Raises InvalidRequest for another format.
    """
    if style == "tokens":
        return {"tokens": session.tree.log(session.head).tolist()}
    writers: dict[str, Callable[[Session, list[Entry]], Answer]] = {
        "items": _items,
        "openai": _openai,
        "anthropic": _anthropic,
    }
    if style not in writers:
        raise InvalidRequest("format is items, openai, anthropic or tokens", param="format")
    return writers[style](session, session.tree.entries(session.head))


def _items(session: Session, entries: list[Entry]) -> Answer:
    items: list[Any] = [
        {"turn": entry.turn, **msgspec.to_builtins(item)}
        for entry in entries
        for item in (*entry.fed, *entry.output)
    ]
    if session.profile.system is not None:
        items.insert(0, {"type": "system", "content": session.profile.system})
    return items


def _text(output: tuple[OutputItem, ...]) -> str:
    return "".join(
        item.text if isinstance(item, TextOut) else item.raw
        for item in output
        if isinstance(item, TextOut | MalformedToolCallOut)
    )


def _calls(output: tuple[OutputItem, ...]) -> list[ToolCallOut]:
    return [item for item in output if isinstance(item, ToolCallOut)]


def _openai(session: Session, entries: list[Entry]) -> Answer:
    messages: list[Any] = []
    if session.profile.system is not None:
        messages.append({"role": "system", "content": session.profile.system})
    for entry in entries:
        messages += [_openai_input(item) for item in entry.fed]
        if entry.output:
            messages.append(_openai_output(entry.output))
    return messages


def _openai_input(item: Item) -> dict[str, Any]:
    if isinstance(item, ToolResultItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": result_text(item)}
    role = "user" if isinstance(item, UserItem) else "system"
    content = item.content if isinstance(item, UserItem | SystemItem) else ""
    return {"role": role, "content": plain_text(content)}


def _openai_output(output: tuple[OutputItem, ...]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(output) or None}
    if calls := _calls(output):
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return message


def _anthropic(session: Session, entries: list[Entry]) -> Answer:
    """Return {system, messages}: consecutive inputs are one user message, as that API wants."""
    system = [session.profile.system] if session.profile.system is not None else []
    messages: list[dict[str, Any]] = []
    for entry in entries:
        system += [plain_text(item.content) for item in entry.fed if isinstance(item, SystemItem)]
        blocks = [_anthropic_input(item) for item in entry.fed if not isinstance(item, SystemItem)]
        _append(messages, "user", blocks)
        _append(messages, "assistant", _anthropic_output(entry.output))
    return {"system": "\n\n".join(system), "messages": messages}


def _append(messages: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    if not blocks:
        return
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"].extend(blocks)
    else:
        messages.append({"role": role, "content": blocks})


def _anthropic_input(item: Item) -> dict[str, Any]:
    if isinstance(item, ToolResultItem):
        return {
            "type": "tool_result",
            "tool_use_id": item.call_id,
            "content": result_text(item),
            "is_error": item.status != "ok",
        }
    content = item.content if isinstance(item, UserItem) else ""
    return {"type": "text", "text": plain_text(content)}


def _anthropic_output(output: tuple[OutputItem, ...]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if text := _text(output):
        blocks.append({"type": "text", "text": text})
    blocks += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments}
        for call in _calls(output)
    ]
    return blocks
