"""Worked examples of tools: what a user says, and the arguments of the call that answers it.

Small models copy how calls look from the conversation, hardly from a description of them. So a
value that an example makes up stands in both, and never is the parameter's own name. After a result
such a model calls again and again, unless each example ends with an answer.
"""

import json
import re
from itertools import cycle
from typing import Any

from agentserve import wire

RESULT, ANSWER = "blue and green", "It is blue and green."

_DEPTH = 3
_NUMBERS = (2, 5, 7)
_WORDS = ("apple", "river", "stone")
# The value that a description gives as an example, up to the next space or a full stop.
_SUCH_AS = re.compile(r"\b(?:such as|for example|e\.g\.),? [`'\"]?([^\s`'\",;()]+)")


def worked_example(tool: wire.Tool) -> tuple[str, dict[str, Any]]:
    """Return what a user says and the arguments of the right call.

    A client's first example is taken: the arguments, or `{"input": what the user says,
    "arguments": {...}}`. Without one the arguments are made from the schema, and without an input
    the description with the values says it.
    """
    given = tool.examples[0] if tool.examples else None
    if not isinstance(given, dict):
        arguments = _Sampler().object(tool.parameters)
    elif isinstance(given.get("arguments"), dict) and set(given) <= {"input", "arguments"}:
        arguments = given["arguments"]
        if isinstance(given.get("input"), str) and given["input"]:
            return given["input"], arguments
    else:
        arguments = given
    return _said(tool, arguments), arguments


def first_line(text: str) -> str:
    """Return the first line of a description."""
    return text.strip().partition("\n")[0]


def _said(tool: wire.Tool, arguments: dict[str, Any]) -> str:
    task = first_line(tool.description).rstrip(".") or f"Use {tool.name}"
    values = ", ".join(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in arguments.values()
    )
    return f"{task}: {values}" if values else f"{task}."


class _Sampler:
    """Makes values that fit the usual schemas: required properties only, three levels deep."""

    def __init__(self) -> None:
        self._words = cycle(_WORDS)
        self._numbers = cycle(_NUMBERS)

    def object(self, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        properties = schema.get("properties")
        if not isinstance(properties, dict) or depth >= _DEPTH:
            return {}
        required = schema.get("required")
        names = required if isinstance(required, list) and required else list(properties)[:1]
        inner = {name: properties.get(name) for name in names if isinstance(name, str)}
        return {
            name: self._value(schema, depth + 1)
            for name, schema in inner.items()
            if isinstance(schema, dict)
        }

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        for key in ("const", "default"):
            if key in schema:
                return schema[key]
        for key in ("examples", "enum"):
            if isinstance(schema.get(key), list) and schema[key]:
                return schema[key][0]
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            items = schema.get("items")
            return (
                [self._value(items, depth + 1)]
                if isinstance(items, dict) and depth < _DEPTH
                else []
            )
        return self._plain(schema, kind)

    def _plain(self, schema: dict[str, Any], kind: Any) -> Any:
        if kind in ("boolean", "null"):
            return True if kind == "boolean" else None
        if kind in ("integer", "number"):
            return schema["minimum"] if "minimum" in schema else next(self._numbers)
        described = _SUCH_AS.search(str(schema.get("description", "")))
        return described[1].rstrip(".") if described else next(self._words)
