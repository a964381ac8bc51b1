"""A request of responses, and what it asks for."""

from collections.abc import Sequence
from typing import Any

from agentserve import wire
from agentserve.dialects import common, signals
from agentserve.dialects.asked import (
    Answered,
    Asked,
    AskedCall,
    Result,
    Said,
    Unit,
    segments,
)
from agentserve.dialects.content import string, system_text, text_of
from agentserve.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"  # to be named in `include`
_SYSTEM = ("system", "developer")


class ResponsesRequest(common.Fields, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: Any = None
    session_id: Any = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    include: Any = None
    truncation: Any = None
    user: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None
    chat_template_kwargs: Any = None


def read(
    request: ResponsesRequest,
    served: str,
    *,
    strict: bool,
    calls: Sequence[AskedCall] = (),
    inherited: Sequence[str] = (),
) -> Asked:
    """Return what the request asks for.

    calls, inherited: of the response that it goes on from: its calls, and the system texts that its
    input began with. Raises InvalidRequest, ModelNotFound.
    """
    _refuse(request)
    warnings: list[str] = []
    lead = leading(request, warnings)
    system = system_text([request.instructions or "", *inherited, *lead])
    units = _units(request, len(lead), warnings)
    tools = _tools(request.tools or [], warnings)
    explicit, cache = signals.from_body(request.session_id, request.prompt_cache_key)
    choice, allowed = _choice(request.tool_choice, tools)
    form = _format(request.text)
    return Asked(
        dialect="responses",
        model=common.require_model(request.model, served, strict=strict),
        system=system,
        segments=segments(units, calls),
        tools=tools,
        turn=wire.TurnRequest(
            input=[],
            max_output_tokens=common.limit(request.max_output_tokens, "max_output_tokens"),
            sampling=common.sampling(request, request.stop, _logprobs(request)),
            tool_choice=choice,
            tools_allowed=allowed,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            response_format=common.beside_choice(form, choice, warnings),
            on_pending="cancel",
            on_disconnect="continue" if request.background else "cancel",
        ),
        stream=request.stream is True,
        options=common.thinking_off((request.reasoning or {}).get("effort"))
        | common.template_options(request.chat_template_kwargs),
        signals=[*explicit, *signals.from_metadata(request.metadata), *cache],
        warnings=warnings,
    )


def _refuse(request: ResponsesRequest) -> None:
    if request.conversation is not None:
        raise InvalidRequest(
            "conversations are not kept here; use previous_response_id", param="conversation"
        )
    if request.background and request.store is False:
        raise InvalidRequest("a response in the background is stored", param="store")


def _logprobs(request: ResponsesRequest) -> int | None:
    """Return how many of the likeliest tokens are told beside each, None without any of it."""
    count = common.top_logprobs(request.top_logprobs)
    included = isinstance(request.include, list) and LOGPROBS in request.include
    return count if included or count else None


def leading(request: ResponsesRequest, warnings: list[str]) -> list[str]:
    """Return the system texts that the input begins with.

    What goes on from the response inherits them, as all of the input, but not `instructions`.
    """
    texts: list[str] = []
    for number, item in enumerate(_items(request)):
        if (item.get("type") or "message") != "message" or item.get("role") not in _SYSTEM:
            break
        texts.append(text_of(item.get("content"), warnings.append, f"input[{number}]"))
    return texts


def _items(request: ResponsesRequest) -> list[dict[str, Any]]:
    given = request.input or []
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _units(request: ResponsesRequest, first: int, warnings: list[str]) -> list[Unit]:
    units: list[Unit] = []
    answer: list[dict[str, Any]] = []  # items of the assistant that stand together
    for number, item in enumerate(_items(request)[first:], start=first):
        param = f"input[{number}]"
        kind = item.get("type") or "message"
        if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            answer.append(item)
            continue
        if answer:
            units.append(_answered(answer, warnings, param))
            answer = []
        units += _fed(item, kind, warnings, param)
    if answer:
        units.append(_answered(answer, warnings, "input"))
    return units


def _fed(item: dict[str, Any], kind: Any, warnings: list[str], param: str) -> list[Unit]:
    if kind == "function_call_output":
        call_id = string(item.get("call_id"), f"{param}.call_id")
        output = item.get("output")
        return [Result(call_id, text_of(output, warnings.append, f"{param}.output"))]
    if kind == "message":
        role = item.get("role")
        text = text_of(item.get("content"), warnings.append, param)
        if role == "user":
            return [Said("user", text)]
        if role in _SYSTEM:
            return [Said("system", text)]
        raise InvalidRequest(f"the role {str(role)[:40]!r} is not known", param=param)
    if kind == "item_reference":
        raise InvalidRequest("items are not kept by id: send the item itself", param=param)
    warnings.append("item of another kind dropped")
    return []


def _answered(items: list[dict[str, Any]], warnings: list[str], param: str) -> Answered:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[AskedCall] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call":
            calls.append(
                AskedCall(
                    string(item.get("call_id"), f"{param}.call_id"),
                    string(item.get("name"), f"{param}.name"),
                    string(item.get("arguments") or "", f"{param}.arguments"),
                )
            )
        elif kind == "reasoning":
            thoughts.append(text_of(item.get("content"), warnings.append, param, ""))
        else:
            texts.append(text_of(item.get("content"), warnings.append, param, ""))
    return Answered("".join(texts), "".join(thoughts), tuple(calls))


def _tools(declared: list[dict[str, Any]], warnings: list[str]) -> list[wire.Tool]:
    tools = []
    for number, one in enumerate(declared):
        if one.get("type") == "function":
            tools.append(common.tool(one, one.get("parameters"), f"tools[{number}]"))
        else:
            warnings.append("tool of another type than function dropped")
    return tools


def _choice(choice: Any, tools: list[wire.Tool]) -> "tuple[Any, list[str] | None]":
    """Return tool_choice and tools_allowed."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", None
    if isinstance(choice, dict) and choice.get("type") == "function":
        return common.named(tools, choice.get("name"), "tool_choice"), None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        names = [
            common.named(tools, one.get("name"), "tool_choice").name
            for one in (allowed if isinstance(allowed, list) else [])
            if isinstance(one, dict)
        ]
        return ("required" if choice.get("mode") == "required" else "auto"), names
    raise InvalidRequest(
        "tool_choice is auto, none, required or names a function", param="tool_choice"
    )


def _format(text: dict[str, Any] | None) -> wire.ResponseFormat | None:
    return common.response_format((text or {}).get("format"), "text.format")
