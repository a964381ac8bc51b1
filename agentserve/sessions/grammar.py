"""Which outputs a turn may generate, as the structural tag (JSON) that xgrammar compiles."""

import json
from collections.abc import Sequence
from typing import Any

from agentserve import wire
from agentserve.sessions.compilable import compilable
from agentserve.sessions.forms.form import list_content, schema_content
from agentserve.sessions.toolformat import ToolFormat


def structural_tag(
    tools: Sequence[wire.Tool],
    choice: str | wire.NamedTool,
    format: ToolFormat,
    parallel: bool = True,
    *,
    in_reasoning: bool = False,
    answer: dict[str, Any] | None = None,
) -> str | None:
    """Return the constraint of a turn that may call `tools`; None when there is none.

    "auto": free text until a call opens, then that call is constrained; with an `answer` (its
    schema), calls or that. "required", or a tool (by name, or as NamedTool): a call from the first
    token on. All of it begins after the reasoning, where the format has it; `in_reasoning`: the
    prompt has opened it.
    """
    if isinstance(choice, wire.NamedTool) or choice not in ("auto", "none", "required"):
        name = choice.name if isinstance(choice, wire.NamedTool) else choice
        tools = [tool for tool in tools if tool.name == name]
        choice = "required"
    if not tools or choice == "none":
        return None
    one = format.one_call or not parallel
    schemas = [
        (tool.name, {"type": "object", **compilable(tool.parameters, arguments=True).schema})
        for tool in tools
    ]
    found = format.constrain(schemas, one=one)
    if choice == "auto" and answer is None:
        free: dict[str, Any] = {
            "type": "triggered_tags",
            "triggers": found.triggers,
            "tags": [*found.tags, *found.variants],
            "stop_after_first": one,
        }
        return _dump(_after_reasoning(free, format, in_reasoning))
    calls = list_content(found.tags, found.separator, one=one)
    if choice == "auto" and answer is not None:
        calls = {"type": "or", "elements": [calls, schema_content(compilable(answer).schema)]}
    return _dump(_after_reasoning(calls, format, in_reasoning))


def triggers(tools: Sequence[wire.Tool], format: ToolFormat) -> list[str]:
    """Return what opens a call of a constrained turn; without one of these, text is text."""
    return format.constrain([(tool.name, {}) for tool in tools], one=False).triggers


def openings(tools: Sequence[wire.Tool], format: ToolFormat) -> list[str]:
    """Return what a turn's calls begin with where all else is an answer of a schema."""
    tags = format.constrain([(tool.name, {}) for tool in tools], one=False).tags
    return [tag["begin"] for tag in tags]


def response_tag(
    schema: dict[str, Any], format: ToolFormat | None = None, *, in_reasoning: bool = False
) -> str:
    """Return the constraint of an answer that is JSON of `schema`."""
    answer = schema_content(compilable(schema).schema)
    if format is None:
        return _dump(answer)
    return _dump(_after_reasoning(answer, format, in_reasoning))


def _after_reasoning(
    then: dict[str, Any], format: ToolFormat, in_reasoning: bool
) -> dict[str, Any]:
    tags = format.thought or format.reasoning
    if tags is None:
        return then
    opening, closing = tags
    thought = {
        "type": "tag",
        "begin": "" if in_reasoning else opening,
        # A call in the reasoning would be none of the grammar's.
        "content": {
            "type": "any_text",
            "excludes": [closing, *format.form.markers, *format.form.noise],
        },
        "end": [closing + "\n\n", closing],
    }
    first = thought if in_reasoning else {"type": "optional", "content": thought}
    return {"type": "sequence", "elements": [first, then]}


def _dump(format: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": format}, ensure_ascii=False)
