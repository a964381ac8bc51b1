"""Which outputs a turn may generate, as the structural tag (JSON) that xgrammar compiles."""

import json
from collections.abc import Sequence
from typing import Any

from agentserve import wire
from agentserve.sessions.compilable import Allowance
from agentserve.sessions.schemas import validate_schema
from agentserve.sessions.toolformat import ToolFormat

__all__ = ["response_tag", "structural_tag", "validate_schema"]


def structural_tag(
    tools: Sequence[wire.Tool],
    choice: str | wire.NamedTool,
    format: ToolFormat,
    parallel: bool = True,
) -> str | None:
    """Return the constraint of a turn that may call `tools`; None when there is none.

    "auto": free text until a call opens, then that call is constrained. "required", or a tool (by
    name, or as NamedTool): a call from the first token on, after reasoning where the format has it.
    """
    if isinstance(choice, wire.NamedTool) or choice not in ("auto", "none", "required"):
        name = choice.name if isinstance(choice, wire.NamedTool) else choice
        tools = [tool for tool in tools if tool.name == name]
        choice = "required"
    if not tools or choice == "none":
        return None
    allowance = Allowance()
    one = format.one_call or not parallel
    schemas = [
        (tool.name, {"type": "object", **allowance.compilable(tool.parameters)}) for tool in tools
    ]
    found = format.constrain(schemas, one=one)
    if choice == "auto":
        return _dump(
            {
                "type": "triggered_tags",
                "triggers": found.triggers,
                "tags": found.tags,
                "stop_after_first": one,
            }
        )
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": found.tags,
        "separator": found.separator,
        "at_least_one": True,
        "stop_after_first": one,
    }
    return _dump(_after_reasoning(calls, format))


def response_tag(schema: dict[str, Any], format: ToolFormat | None = None) -> str:
    """Return the constraint of an answer that is JSON of `schema`."""
    answer = {"type": "json_schema", "json_schema": Allowance().compilable(schema), **_COMPACT}
    return _dump(_after_reasoning(answer, format) if format is not None else answer)


# Small models can fill their whole budget with white space.
_COMPACT = {"max_whitespace_cnt": 2}


def _after_reasoning(then: dict[str, Any], format: ToolFormat) -> dict[str, Any]:
    tags = format.thought or format.reasoning
    if tags is None:
        return then
    opening, closing = tags
    thought = {
        "type": "tag",
        "begin": opening,
        "content": {"type": "any_text", "excludes": [closing]},
        "end": [closing + "\n\n", closing],
    }
    return {"type": "sequence", "elements": [{"type": "optional", "content": thought}, then]}


def _dump(format: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": format}, ensure_ascii=False)
