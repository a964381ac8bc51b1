"""The wire forms of tool calls, one a family of models, as data.

json: a bare `{"name": ..., "arguments": {...}}` on a line of its own, for models whose template
knows no tools (SmolLM2). The system message lists the tools; the conversation begins with one
worked example of each. In all other families the chat template lists the tools.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from agentserve import wire
from agentserve.sessions.examples import first_line
from agentserve.sessions.forms.elements import Elements
from agentserve.sessions.forms.form import Call, Constraint, Form, Tool
from agentserve.sessions.forms.harmony import Harmony
from agentserve.sessions.forms.llama import Llama
from agentserve.sessions.forms.mistral import Mistral
from agentserve.sessions.forms.named import Named
from agentserve.sessions.forms.objects import Objects


class ToolFormat(msgspec.Struct, frozen=True):
    """How one family of models writes calls.

    `signs` are strings of a chat template that together tell the family.
    `reasoning` are the tags around it; `thought` is what is written around it where no tags are.
    `native` templates list the tools themselves. `one_call` families take one call a message.
    `headed`: the model writes part of the header that the template prints. `reasoning_key` is what
    the template calls reasoning; with `text_or_reasoning` it takes one of both beside a call.
    `numbered`: ids of calls have their names in them.
    """

    name: str
    form: Form
    signs: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = None
    thought: tuple[str, str] | None = None
    native: bool = True
    one_call: bool = False
    headed: bool = False
    reasoning_key: str = "reasoning_content"
    text_or_reasoning: bool = False
    numbered: bool = False

    def prompt_id(self, call_id: str, name: str) -> str:
        """Return the id that the template prints for a call with our nine-character id."""
        if not self.numbered:
            return call_id
        digits = "".join(filter(str.isdigit, call_id))
        return f"functions.{name}:{int(digits or 0)}"

    def system(self, tools: Sequence[wire.Tool], text: str | None) -> str | None:
        """Return the system text that also tells of `tools`; None when the template does that."""
        if self.native or not tools:
            return None
        return _tool_prompt(tools) if not text else f"{text}\n\n{_tool_prompt(tools)}"

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of one call."""
        return self.form.write([(name, arguments)])

    def emit(self, parts: Sequence[wire.Text | wire.ToolCall]) -> str:
        """Return the text that the model would generate for `parts`."""
        texts: list[str] = []
        calls: list[Call] = []
        for part in parts:
            if isinstance(part, wire.ToolCall):
                calls.append((part.name, part.arguments))
                continue
            texts += [self.form.write(calls)] if calls else []
            texts.append(part.text)
            calls = []
        texts += [self.form.write(calls)] if calls else []
        return "\n".join(text for text in texts if text)

    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return the structural tags of calls to `tools` (name, schema), one call with `one`."""
        return self.form.constrain(tools, one=one)


_THINK = ("<think>", "</think>")

JSON = ToolFormat("json", Objects(), native=False)
HERMES = ToolFormat(
    "hermes",
    Objects("<tool_call>", "</tool_call>", bare_at="start"),
    ("<tool_call>",),
    _THINK,
)
LLAMA = ToolFormat("llama", Llama(), ("<|start_header_id|>", "parameters"), one_call=True)
MISTRAL_LIST = ToolFormat(
    "mistral-list", Mistral(listed=True), ("[TOOL_CALLS]",), ("[THINK]", "[/THINK]")
)
MISTRAL = ToolFormat("mistral", Mistral(), ("[TOOL_CALLS]", "[ARGS]"), ("[THINK]", "[/THINK]"))
QWEN_CODER = ToolFormat(
    "qwen-coder",
    Elements(
        outer=("<tool_call>", "</tool_call>"),
        name=("<function=", ">"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        close="</function>",
        style="qwen_xml",
        lined=True,
    ),
    ("<tool_call>", "<function="),
    _THINK,
)
HARMONY = ToolFormat(
    "harmony",
    Harmony(),
    ("<|channel|>", "<|message|>"),
    thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    one_call=True,
    headed=True,
    reasoning_key="thinking",
    text_or_reasoning=True,
)
GLM = ToolFormat(
    "glm",
    Elements(
        outer=("<tool_call>", ""),
        name=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        close="</tool_call>",
        style="glm_xml",
    ),
    ("<tool_call>", "<arg_key>"),
    _THINK,
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK = ToolFormat(
    "deepseek",
    Named(
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        header=rf"\s*\w*{_SEPARATOR}\s*(?P<name>[^\s`]+)\s*(?:```\w*)?\s*",
        written=f"function{_SEPARATOR}{{0}}\n```json\n",
        around=_DEEPSEEK,
        between="\n",
        fenced=True,
    ),
    (_DEEPSEEK[0], "```"),
    _THINK,
)
DEEPSEEK_31 = ToolFormat(
    "deepseek-v3.1",
    Named(
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        header=rf"\s*(?P<name>[^\s`<]+)\s*{_SEPARATOR}\s*",
        written=f"{{0}}{_SEPARATOR}",
        around=_DEEPSEEK,
    ),
    (_DEEPSEEK[0],),
    _THINK,
)
KIMI = ToolFormat(
    "kimi",
    Named(
        begin="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        header=r"\s*(?:functions\.)?(?P<name>[^\s:<]+)\s*(?::\s*\d+)?\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        written="functions.{0}:{1}<|tool_call_argument_begin|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ("<|tool_call_begin|>",),
    _THINK,
    numbered=True,
)
MINIMAX = ToolFormat(
    "minimax",
    Elements(
        outer=("<minimax:tool_call>", "</minimax:tool_call>"),
        name=('<invoke name="', '">'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        close="</invoke>",
        style="minimax_xml",
    ),
    ("<minimax:tool_call>",),
    _THINK,
)
# The more a family's signs say, the earlier it stands: the first that fits is taken.
FORMATS = {
    format.name: format
    for format in (
        MINIMAX,
        KIMI,
        DEEPSEEK,
        DEEPSEEK_31,
        HARMONY,
        MISTRAL,
        MISTRAL_LIST,
        GLM,
        QWEN_CODER,
        HERMES,
        LLAMA,
        JSON,
    )
}


def detect(chat_template: str) -> ToolFormat:
    """Return the format that a chat template is written for; bare JSON where it knows no tools."""
    for format in FORMATS.values():
        if format.signs and all(sign in chat_template for sign in format.signs):
            return format
    return JSON


def choose(name: str, chat_template: str) -> ToolFormat:
    """Return the format called `name`, for "auto" the one that the chat template is written for.

    Raises ValueError for an unknown name.
    """
    if name == "auto":
        return detect(chat_template)
    if name not in FORMATS:
        raise ValueError(f"no tool format {name!r}; there are: auto, {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def _tool_prompt(tools: Sequence[wire.Tool]) -> str:
    task = "You have these tools. Call one with a line of JSON. Then tell the user its result."
    return "\n".join((task, *map(_described, tools)))


def _described(tool: wire.Tool) -> str:
    properties = tool.parameters.get("properties")
    names = ", ".join(properties) if isinstance(properties, dict) else ""
    line = f"- {tool.name}: {first_line(tool.description) or 'a tool'}"
    return f"{line} Arguments: {names}" if names else line
