"""The wire forms of tool calls, as data.

hermes: `<tool_call>`, a line of JSON, `</tool_call>`, with reasoning in `<think>` (Hermes, Qwen2.5,
Qwen3). The chat template lists the tools.

json: a bare `{"name": ..., "arguments": {...}}` on a line of its own, for models whose template
knows no tools (SmolLM2). The system message lists the tools with one worked example each.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from agentserve import wire


class ToolFormat(msgspec.Struct, frozen=True):
    """How one family of models writes calls.

    `begin` and `end` enclose a call's JSON, `reasoning` its two tags. `native` templates list the
    tools themselves. `one_call` families take one call a message.
    """

    name: str
    begin: str = ""
    end: str = ""
    reasoning: tuple[str, str] | None = None
    native: bool = False
    one_call: bool = False

    def system(self, tools: Sequence[wire.Tool], text: str | None) -> str | None:
        """Return the system text that also tells of `tools`; None when the template does that."""
        if self.native or not tools:
            return None
        return _tool_prompt(tools) if not text else f"{text}\n\n{_tool_prompt(tools)}"

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of one call."""
        body = f'{{"name": {_dump(name)}, "arguments": {_dump(arguments)}}}'
        return f"{self.begin}\n{body}\n{self.end}" if self.begin else body

    def emit(self, parts: Sequence[wire.Text | wire.ToolCall]) -> str:
        """Return the text that the model would generate for `parts`."""
        texts = [
            self.call(part.name, part.arguments) if isinstance(part, wire.ToolCall) else part.text
            for part in parts
        ]
        return "\n".join(text for text in texts if text)


JSON = ToolFormat("json")
HERMES = ToolFormat(
    "hermes", "<tool_call>", "</tool_call>", reasoning=("<think>", "</think>"), native=True
)


def detect(chat_template: str) -> ToolFormat:
    """Return the format that a chat template is written for; bare JSON where it knows no tools."""
    if "<tool_call>" in chat_template and "<function=" not in chat_template:
        return HERMES
    return JSON


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tool_prompt(tools: Sequence[wire.Tool]) -> str:
    lines = [
        "You can use these tools. To use one, answer with one line of JSON like in its example.",
    ]
    for tool in tools:
        lines.append(f"- {tool.name}: {_first_line(tool.description) or 'a tool'}")
        lines.append(_example(tool))
    lines.append("When you have what you need, answer in plain text.")
    return "\n".join(lines)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _example(tool: wire.Tool) -> str:
    """Return a worked example: the first that the client gave, or one made from the schema.

    A client's example is the arguments, or `{"input": what the user says, "arguments": {...}}`.
    """
    given = tool.examples[0] if tool.examples else None
    if not isinstance(given, dict):
        return JSON.call(tool.name, _sample(tool.parameters))
    if isinstance(given.get("arguments"), dict) and set(given) <= {"input", "arguments"}:
        call = JSON.call(tool.name, given["arguments"])
        return f"  {given['input']}\n{call}" if given.get("input") else call
    return JSON.call(tool.name, given)


def _sample(schema: dict[str, Any], name: str = "", depth: int = 0) -> Any:
    """Return a value that fits the usual schemas: required properties only, three levels deep."""
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    kind = schema.get("type", "object" if "properties" in schema or not name else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        return _sample_object(schema, depth)
    if kind == "array":
        items = schema.get("items")
        if not isinstance(items, dict) or depth >= 3:
            return []
        return [_sample(items, name or "item", depth + 1)]
    plain: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "null": None}
    return plain.get(kind, name) if isinstance(kind, str) else name


def _sample_object(parent: dict[str, Any], depth: int) -> dict[str, Any]:
    properties = parent.get("properties")
    if not isinstance(properties, dict) or depth >= 3:
        return {}
    required = parent.get("required")
    names = required if isinstance(required, list) and required else list(properties)[:1]
    inner = {name: properties.get(name) for name in names if isinstance(name, str)}
    return {
        name: _sample(schema, name, depth + 1)
        for name, schema in inner.items()
        if isinstance(schema, dict)
    }
