"""Reads logs of OpenAI chat messages: a session, a request or a message on each line."""

import hashlib
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

from agentserve.replay.logged import BadLine, Logged, LoggedCall, Role, declared_tool, parse_json
from agentserve.replay.scenario import ScenarioTool

Line = tuple[int, Any]  # the number, from 1, and the JSON value
GROUPS = ("session_id", "conversation_id", "thread_id")
TIMES = ("timestamp", "created_at")
MILLISECONDS = 1e11  # an epoch time above this is in milliseconds
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class OpenedSession(msgspec.Struct):
    """One session of a log, not yet a story."""

    messages: list[Logged]
    tools: list[ScenarioTool] = []


def has_session(value: Any) -> bool:
    """Return whether a line holds a whole list of messages."""
    return _holder(value) is not None


def has_message(value: Any) -> bool:
    """Return whether a line is one message."""
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def read_sessions(lines: list[Line]) -> tuple[list[OpenedSession], int]:
    """Return the sessions of a log with a session or a request on each line.

    Logs of requests hold a session many times, each time with more messages: such a line that
    another one continues is left out, and the number of those is returned. Raises BadLine.
    """
    sessions = []
    for number, value in lines:
        holder = _holder(value)
        if holder is None:
            raise BadLine(number, "no list of messages, unlike the lines before")
        sessions.append(_session(number, holder, [*holder["messages"], *_response(value)]))
    digests = [list(_prefixes(session.messages)) for session in sessions]
    continued = {digest for prefixes in digests for digest in prefixes[:-1]}
    kept = [
        session
        for session, prefixes in zip(sessions, digests, strict=True)
        if prefixes[-1] not in continued
    ]
    return kept, len(sessions) - len(kept)


def read_messages(lines: list[Line]) -> list[OpenedSession]:
    """Return the sessions of a log with a message on each line, told apart by a session id.

    Raises BadLine.
    """
    sessions: dict[Any, OpenedSession] = {}
    for number, value in lines:
        if not has_message(value):
            raise BadLine(number, "no message with a role, unlike the lines before")
        key = next((str(value[name]) for name in GROUPS if name in value), "")
        sessions.setdefault(key, OpenedSession([])).messages.append(_message(number, value))
    return list(sessions.values())


def _holder(value: Any) -> dict[str, Any] | None:
    """Return the object with the messages: the line, its request, or the list that it is."""
    if isinstance(value, list) and value and all(has_message(message) for message in value):
        return {"messages": value}
    if not isinstance(value, dict):
        return None
    for holder in (value, value.get("request"), value.get("body")):
        if isinstance(holder, dict) and isinstance(holder.get("messages"), list):
            return holder
    return None


def _response(value: Any) -> list[Any]:
    """Return the answer that a log of requests keeps beside the request."""
    response = value.get("response") if isinstance(value, dict) else None
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return []
    message = choices[0].get("message")
    return [message] if isinstance(message, dict) else []


def _prefixes(messages: list[Logged]) -> Iterator[bytes]:
    """Yield a digest of no message, of the first one, of the first two, and so on.

    Only what the model reads counts: the same message comes with other fields in an answer.
    """
    running = hashlib.sha256()
    yield running.digest()
    for message in messages:
        calls = [(call.name, call.arguments) for call in message.calls]
        running.update(json.dumps([message.role, message.text, calls], sort_keys=True).encode())
        yield running.digest()


def _session(number: int, holder: dict[str, Any], raw: list[Any]) -> OpenedSession:
    messages = [_message(number, message) for message in raw]
    results = [message for message in messages if message.role == "tool"]
    seconds = holder.get("tool_seconds") or []
    if len(seconds) not in (0, len(results)):
        raise BadLine(number, f"{len(seconds)} tool_seconds for {len(results)} tool messages")
    for message, taken in zip(results, seconds, strict=False):
        message.seconds = _seconds(taken, number)
    declared = holder.get("tools") or []
    tools = [declared_tool(tool) for tool in declared] if isinstance(declared, list) else []
    return OpenedSession(messages, [tool for tool in tools if tool is not None])


def _seconds(value: Any, number: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise BadLine(number, f"tool_seconds has {value!r}, which is no time")
    return float(value)


def _message(number: int, raw: Any) -> Logged:
    if not isinstance(raw, dict):
        raise BadLine(number, "a message is no object")
    role = ROLES.get(str(raw.get("role")))
    if role is None:
        raise BadLine(number, f"a message has the role {raw.get('role')!r}")
    return Logged(
        role=role,
        text=content_text(raw.get("content"), number),
        calls=_calls(number, raw) if role == "assistant" else [],
        call_id=str(raw.get("tool_call_id") or ""),
        at=next((time for name in TIMES if (time := log_time(raw.get(name))) is not None), None),
        thinking=bool(raw.get("reasoning_content") or raw.get("reasoning")),
    )


def _calls(number: int, raw: dict[str, Any]) -> list[LoggedCall]:
    calls = raw.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadLine(number, "tool_calls is no list")
    if isinstance(raw.get("function_call"), dict):  # the form of 2023
        calls = [*calls, {"function": raw["function_call"]}]
    return [_call(number, index, call) for index, call in enumerate(calls)]


def _call(number: int, index: int, raw: Any) -> LoggedCall:
    function = raw.get("function", raw.get("custom")) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLine(number, "a tool call has no function with a name")
    arguments = function.get("arguments", function.get("input", {}))
    return LoggedCall(str(raw.get("id") or f"#{index}"), function["name"], as_object(arguments))


def as_object(arguments: Any) -> dict[str, Any]:
    """Return a call's arguments as an object; what the model garbled goes into one field."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return {"input": arguments}
    return arguments if isinstance(arguments, dict) else {"input": arguments}


def content_text(content: Any, line: int) -> str:
    """Return a message's content as text; what is no text is named in brackets.

    Raises BadLine for other contents than text, null and lists of parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadLine(line, "a content is neither text nor a list of parts")
    return "\n".join(_part_text(part, line) for part in content)


def _part_text(part: Any, line: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadLine(line, "a part of a content is no object")
    if isinstance(part.get("text"), str):
        return str(part["text"])
    return f"[{part.get('type', 'something')}]"


def log_time(value: Any) -> float | None:
    """Return an ISO 8601 time or an epoch time (s or ms) in seconds; None for anything else."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value / 1000 if value > MILLISECONDS else float(value)
