"""The wire forms of tool calls, as data.

hermes: `<tool_call>`, a line of JSON, `</tool_call>`, with reasoning in `<think>` (Hermes, Qwen2.5,
Qwen3). The chat template lists the tools.

json: a bare `{"name": ..., "arguments": {...}}` on a line of its own, for models whose template
knows no tools (SmolLM2). The system message lists the tools; the conversation begins with one
worked example of each.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from agentserve import wire
from agentserve.sessions.examples import first_line


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
    task = "You have these tools. Call one with a line of JSON. Then tell the user its result."
    return "\n".join((task, *map(_described, tools)))


def _described(tool: wire.Tool) -> str:
    properties = tool.parameters.get("properties")
    names = ", ".join(properties) if isinstance(properties, dict) else ""
    line = f"- {tool.name}: {first_line(tool.description) or 'a tool'}"
    return f"{line} Arguments: {names}" if names else line
