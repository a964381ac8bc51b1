"""A request of messages, and what it asks for."""

from typing import Any

import msgspec

from agentserve import wire
from agentserve.dialects import common, signals
from agentserve.dialects.asked import Answered, Asked, AskedCall, Result, Said, Unit, segments
from agentserve.dialects.content import string, system_text, text_of
from agentserve.errors import InvalidRequest

_SERVER_TOOLS = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
)


class Message(msgspec.Struct, frozen=True):
    """One message; cache marks and the like are ignored."""

    role: str
    content: str | list[dict[str, Any]]


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages and of count_tokens."""

    messages: list[Message]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: dict[str, Any] | None = None
    metadata: Any = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    session_id: Any = None
    service_tier: Any = None
    container: Any = None
    mcp_servers: Any = None
    betas: Any = None
    cache_control: Any = None
    inference_geo: Any = None
    speed: Any = None


def read(request: MessagesRequest, served: str, *, strict: bool, generates: bool = True) -> Asked:
    """Return what the request asks for. Raises InvalidRequest, ModelNotFound."""
    if generates and request.max_tokens is None:
        raise InvalidRequest("the limit of the answer is needed", param="max_tokens")
    warnings: list[str] = []
    system, units = _conversation(request, warnings)
    tools = _tools(request.tools or [], warnings)
    fields = common.Fields(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k
    )
    choice = request.tool_choice or {}
    chosen = _choice(choice, tools)
    explicit, _ = signals.from_body(request.session_id, None)
    return Asked(
        dialect="messages",
        model=common.require_model(request.model, served, strict=strict),
        system=system,
        segments=segments(units),
        tools=tools,
        turn=wire.TurnRequest(
            input=[],
            max_output_tokens=common.limit(request.max_tokens, "max_tokens"),
            sampling=common.sampling(fields, request.stop_sequences),
            tool_choice=chosen,
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            response_format=common.beside_choice(_format(request), chosen, warnings),
            on_pending="cancel",
        ),
        stream=request.stream is True,
        options={"enable_thinking": False} if _kind(request.thinking) == "disabled" else {},
        keep_reasoning=_keeps_reasoning(request.context_management),
        signals=[*explicit, *signals.from_metadata(request.metadata)],
        warnings=warnings,
    )


def _conversation(request: MessagesRequest, warnings: list[str]) -> tuple[str | None, list[Unit]]:
    given = request.system or []
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
    lead = [text_of([block], warnings.append, "system") for block in blocks]
    units: list[Unit] = []
    for number, message in enumerate(request.messages):
        param = f"messages.{number}"
        content = message.content
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message.role == "user":
            units += _user(blocks, warnings, param)
        elif message.role == "assistant":
            units.append(_assistant(blocks, warnings, param))
        elif message.role == "system":
            text = system_text([text_of([block], warnings.append, param) for block in blocks])
            if units and text is not None:
                units.append(Said("system", text))
            elif text is not None:
                lead.append(text)
        else:
            raise InvalidRequest(f"the role {message.role[:40]!r} is not known", param=param)
    if units and isinstance(units[-1], Answered):
        raise InvalidRequest(
            "the conversation must end with a user message: an answer is not continued",
            param="messages",
        )
    return system_text(lead), units


def _user(blocks: list[dict[str, Any]], warnings: list[str], param: str) -> list[Unit]:
    """Return the results in a user message, then what was said."""
    results: list[Unit] = []
    said: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            text = text_of(block.get("content"), warnings.append, param)
            call_id = string(block.get("tool_use_id"), f"{param}.tool_use_id")
            failed = block.get("is_error") is True
            results.append(Result(call_id, text, "error" if failed else "ok"))
        elif block.get("type") in _SERVER_TOOLS:
            warnings.append("block of a server tool dropped")
        else:
            said.append(text_of([block], warnings.append, param))
    return [*results, Said("user", "\n".join(said))] if said or not results else results


def _assistant(blocks: list[dict[str, Any]], warnings: list[str], param: str) -> Answered:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[AskedCall] = []
    for block in blocks:
        kind = string(block.get("type", "text"), param)
        if kind == "tool_use":
            arguments = block.get("input")
            calls.append(
                AskedCall(
                    string(block.get("id"), f"{param}.id"),
                    string(block.get("name"), f"{param}.name"),
                    wire.encode({} if arguments is None else arguments).decode(),
                )
            )
        elif kind == "thinking":
            thoughts.append(string(block.get("thinking"), f"{param}.thinking"))
        elif kind == "redacted_thinking" or kind in _SERVER_TOOLS:
            warnings.append(f"{'reasoning' if 'think' in kind else 'block'} dropped")
        else:
            texts.append(text_of([block], warnings.append, param))
    return Answered("".join(texts), "".join(thoughts), tuple(calls))


def _tools(declared: list[dict[str, Any]], warnings: list[str]) -> list[wire.Tool]:
    tools = []
    for number, one in enumerate(declared):
        if one.get("type") in (None, "custom"):
            tools.append(common.tool(one, one.get("input_schema"), f"tools.{number}"))
        else:
            warnings.append("server tool dropped")
    return tools


def _choice(choice: dict[str, Any], tools: list[wire.Tool]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return common.named(tools, choice.get("name"), "tool_choice")
    if kind in ("auto", "any", "none"):
        return "required" if kind == "any" else kind
    raise InvalidRequest("tool_choice is auto, any, tool or none", param="tool_choice")


def _format(request: MessagesRequest) -> wire.ResponseFormat | None:
    form = (request.output_config or {}).get("format")
    param = "output_format" if form is None else "output_config.format"
    return common.response_format(request.output_format if form is None else form, param)


def _kind(value: dict[str, Any] | None) -> Any:
    return value.get("type") if value is not None else None


def _keeps_reasoning(management: dict[str, Any] | None) -> bool:
    edits = management.get("edits") if management is not None else None
    return isinstance(edits, list) and any(
        isinstance(edit, dict)
        and str(edit.get("type")).startswith("clear_thinking")
        and edit.get("keep") == "all"
        for edit in edits
    )
