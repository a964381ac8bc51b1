"""A request of chat completions, and what it asks for."""

from typing import Any

import msgspec

from agentserve import wire
from agentserve.dialects import common, signals
from agentserve.dialects.asked import Answered, Asked, AskedCall, Result, Said, Unit, segments
from agentserve.dialects.content import string, system_text, text_of
from agentserve.errors import InvalidRequest

_SYSTEM = ("system", "developer")


class Message(msgspec.Struct, frozen=True):
    """One message; what other servers put beside these fields is ignored."""

    role: str
    content: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream has besides the answer."""

    include_usage: bool | None = None


class ChatRequest(common.Fields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    session_id: Any = None
    user: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    verbosity: Any = None
    modalities: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


def read(request: ChatRequest, served: str, *, strict: bool) -> Asked:
    """Return what the request asks for. Raises InvalidRequest, ModelNotFound."""
    _refuse(request)
    warnings: list[str] = []
    system, units = _conversation(request.messages, warnings)
    tools = _tools(request.tools or [], warnings)
    explicit, cache = signals.from_body(request.session_id, request.prompt_cache_key)
    choice, allowed = _choice(request.tool_choice, tools)
    form = _format(request.response_format)
    return Asked(
        dialect="chat",
        model=common.require_model(request.model, served, strict=strict),
        system=system,
        segments=segments(units),
        tools=tools,
        turn=wire.TurnRequest(
            input=[],
            max_output_tokens=_limit(request),
            sampling=common.sampling(request, request.stop, _logprobs(request)),
            tool_choice=choice,
            tools_allowed=allowed,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            response_format=common.beside_choice(form, choice, warnings),
            on_pending="cancel",
        ),
        stream=request.stream is True,
        options=common.thinking_off(request.reasoning_effort)
        | common.template_options(request.chat_template_kwargs),
        signals=[*explicit, *signals.from_metadata(request.metadata), *cache],
        warnings=warnings,
    )


def _refuse(request: ChatRequest) -> None:
    if request.n not in (None, 1):
        raise InvalidRequest("one choice is generated: n is 1", param="n")


def _logprobs(request: ChatRequest) -> int | None:
    """Return how many of the likeliest tokens are told beside each, None without any of it."""
    count = common.top_logprobs(request.top_logprobs)
    if count and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return count if request.logprobs else None


def _limit(request: ChatRequest) -> int | None:
    if request.max_completion_tokens is not None:
        return common.limit(request.max_completion_tokens, "max_completion_tokens")
    return common.limit(request.max_tokens, "max_tokens")


def _conversation(messages: list[Message], warnings: list[str]) -> tuple[str | None, list[Unit]]:
    """Return the system text and what follows it."""
    lead: list[str] = []
    units: list[Unit] = []
    for number, message in enumerate(messages):
        param = f"messages[{number}]"
        if message.role in _SYSTEM and not units:
            lead.append(text_of(message.content, warnings.append, param))
        else:
            units.append(_unit(message, warnings, param))
    return system_text(lead), units


def _unit(message: Message, warnings: list[str], param: str) -> Unit:
    between = "" if message.role == "assistant" else "\n"
    text = text_of(message.content, warnings.append, param, between)
    if message.role == "user":
        return Said("user", text)
    if message.role in _SYSTEM:
        return Said("system", text)
    if message.role == "tool":
        if not message.tool_call_id:
            raise InvalidRequest("a tool message needs the id of its call", param=param)
        return Result(message.tool_call_id, text)
    if message.role == "assistant":
        thought = message.reasoning_content or message.reasoning
        calls = tuple(_call(call, param) for call in message.tool_calls or [])
        return Answered(text, thought if isinstance(thought, str) else "", calls)
    raise InvalidRequest(f"the role {message.role[:40]!r} is not known", param=param)


def _call(call: dict[str, Any], param: str) -> AskedCall:
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest("a tool call has a function", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = wire.encode(arguments).decode()
    return AskedCall(
        string(call.get("id"), f"{param}.id"),
        string(function.get("name"), f"{param}.name"),
        string(arguments or "", f"{param}.arguments"),
    )


def _tools(declared: list[dict[str, Any]], warnings: list[str]) -> list[wire.Tool]:
    tools = []
    for number, one in enumerate(declared):
        function = one.get("function")
        if one.get("type", "function") != "function":
            warnings.append("tool of another type than function dropped")
        elif isinstance(function, dict):
            param = f"tools[{number}]"
            tools.append(common.tool(function, function.get("parameters"), param))
        else:
            raise InvalidRequest("a tool has a function", param=f"tools[{number}]")
    return tools


def _choice(choice: Any, tools: list[wire.Tool]) -> "tuple[Any, list[str] | None]":
    """Return tool_choice and tools_allowed."""
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type") == "function" and isinstance(function, dict):
            return common.named(tools, function.get("name"), "tool_choice"), None
        allowed = choice.get("allowed_tools")
        if choice.get("type") == "allowed_tools" and isinstance(allowed, dict):
            return _allowed(allowed, tools)
    raise InvalidRequest(
        "tool_choice is auto, none, required or names a function", param="tool_choice"
    )


def _allowed(allowed: dict[str, Any], tools: list[wire.Tool]) -> "tuple[Any, list[str]]":
    given = allowed.get("tools")
    names = []
    for one in given if isinstance(given, list) else []:
        function = one.get("function") if isinstance(one, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        names.append(common.named(tools, name, "tool_choice").name)
    return ("required" if allowed.get("mode") == "required" else "auto"), names


def _format(form: dict[str, Any] | None) -> wire.ResponseFormat | None:
    inner = form.get("json_schema") if form is not None else None
    beside = inner if isinstance(inner, dict) else {}
    return common.response_format(form and {**beside, **form}, "response_format")
