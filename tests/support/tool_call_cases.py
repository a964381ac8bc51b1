"""Outputs that broke tool calling in other servers, written anew, with what they really say.

The numbers are those of a survey of 31 bug reports; the letters are further ones of the same kinds.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from agentserve.sessions.toolformat import (
    DEEPSEEK,
    DEEPSEEK_31,
    GLM,
    HARMONY,
    HERMES,
    JSON,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_LIST,
    QWEN_CODER,
    ToolFormat,
)


class Case(NamedTuple):
    number: str
    format: ToolFormat
    text: str
    said: list
    options: Mapping = MappingProxyType({})


def call(name, **arguments):
    return ("tool_call", name, arguments)


def broken(name, error="truncated"):
    return ("malformed_tool_call", name, error)


def text(said):
    return ("text", said)


def thought(said):
    return ("reasoning", said)


def hermes(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def coder(name, *parameters):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


CUT = {"reason": "length"}
LS = '{"name": "ls", "arguments": {}}'
CODE = 'def f(a):\n    """a < b"""\n    if a < 3 and "<b>" != "</b>":\n        return {1: [2]}\n'
BLOCK = "/** {braces} and [more] **/\nfor (;;) { x[\"a\"] = '\\n'; }\n"
LONG = "".join(f"line {i}: x < {i} && y\n" for i in range(1000))  # 20 kB

CASES = [
    Case(
        "1",
        HERMES,
        '<tool_call>\n{"name": "grep", "arguments": {"limit": 7}}\n</tool_call>',
        [call("grep", limit=7)],
    ),
    Case("2", HERMES, hermes(LS), [call("ls")]),
    Case("3", HERMES, f"Wait </tool_ no. {hermes(LS)}", [text("Wait </tool_ no."), call("ls")]),
    Case(
        "4",
        HERMES,
        hermes('{"name": "grep", "arguments": {"pattern": "mkdir -p test/{test1,test2"}}'),
        [call("grep", pattern="mkdir -p test/{test1,test2")],
    ),
    Case(
        "5",
        HERMES,
        hermes('{"name": "grep", "arguments": {"paths": [{"名": "\\"引\\""}, [{"a": ["]"]}]]}}'),
        [call("grep", paths=[{"名": '"引"'}, [{"a": ["]"]}]])],
    ),
    Case(
        "6",
        QWEN_CODER,
        "I search.\n\n" + coder("grep", ("pattern", r"print\(.*\)")),
        [text("I search."), call("grep", pattern=r"print\(.*\)")],
    ),
    Case(
        "7",
        HERMES,
        f"before{hermes(LS)}after",
        [text("before"), call("ls"), text("after")],
    ),
    Case("8", QWEN_CODER, coder("write", ("text", LONG)), [call("write", text=LONG)]),
    Case(
        "9",
        HERMES,
        f"{hermes(LS)}\n{hermes(LS)}\n\n{hermes(LS)}",
        [call("ls"), call("ls"), call("ls")],
    ),
    Case(
        "10",
        QWEN_CODER,
        coder("write", ("path", "a.py"), ("text", CODE)),
        [call("write", path="a.py", text=CODE)],
    ),
    Case(
        "11",
        QWEN_CODER,
        "Tools are called with <tool_call> and <function=...>, as you see. Done.",
        [text("Tools are called with <tool_call> and <function=...>, as you see. Done.")],
    ),
    Case(
        "12",
        HERMES,
        hermes('{"name": "write", "arguments": {"path": "src/main_win')[: -len("\n</tool_call>")],
        [broken("write")],
        CUT,
    ),
    Case(
        "13",
        JSON,
        '{"name": "write", "arguments": {"path": "a", "text": "never closed}}\n',
        [broken("write", "the call is not valid JSON")],
    ),
    Case(
        "14",
        HERMES,
        "For example:\n" + hermes('{"name": "no_such_tool", "arguments": {"x": [}}') + "\nSo.",
        [
            text("For example:"),
            broken("no_such_tool", "the call is not valid JSON"),
            text("So."),
        ],
    ),
    Case(
        "15",
        HERMES,
        hermes('{"name": "ls", "arguments": "{"}'),
        [broken("ls", "the arguments are not a JSON object")],
    ),
    Case(
        "16",
        QWEN_CODER,
        coder("grep", ("pattern", "a\n</parameter>"), ("limit", "many")),
        [call("grep", pattern="a\n</parameter>", limit="many")],
    ),
    Case(
        "17",
        GLM,
        "<tool_call>grep\n<arg_key>pattern</arg_key>\n<arg_value>explore</arg_value>\n</tool_call>",
        [call("grep", pattern="explore")],
    ),
    Case(
        "18",
        QWEN_CODER,
        coder("ls") + "\n" + coder("grep", ("limit", "2")),
        [call("ls"), call("grep", limit=2)],
    ),
    Case(
        "19",
        QWEN_CODER,
        "<function=grep>\n<parameter=limit>\n1\n</parameter>\n</function>\n</tool_call>",
        [call("grep", limit=1)],
    ),
    Case(
        "20",
        HARMONY,
        "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
        '{"text": "/** {braces} and [more] **/\\nfor (;;) { x[\\"a\\"] = \'\\\\n\'; }\\n"}<|call|>',
        [call("write", text=BLOCK)],
    ),
    Case(
        "21",
        HERMES,
        '{"name": "grep", "arguments": {"limit": 3}}',
        [call("grep", limit=3)],
    ),
    Case("22", QWEN_CODER, coder("grep", ("options", '{"a": [1, '))[:-37], [broken("grep")], CUT),
    Case(
        "23",
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>call_f00ba4<|tool_call_argument_begin|>"
        '{"limit": 1}<|tool_call_end|><|tool_calls_section_end|>',
        [call("call_f00ba4", limit=1)],
    ),
    Case(
        "24",
        KIMI,
        "Now.<|tool_calls_section_begin|><|tool_call_begin|>functions.write:\n0\n"
        f'<|tool_call_argument_begin|>{{"text": "{"0123456789" * 900}"}}<|tool_call_end|>'
        "<|tool_call_begin|>functions.ls:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [text("Now."), call("write", text="0123456789" * 900), call("ls")],
    ),
    Case(
        "25",
        MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "grep", "arguments": {"limit": 12}, "id": "Ab3dEf6hI"}]',
        [call("grep", limit=12)],
    ),
    Case(
        "25b",
        MISTRAL,
        '[TOOL_CALLS]grep[ARGS]{"limit": 12}[TOOL_CALLS]ls[ARGS]{}',
        [call("grep", limit=12), call("ls")],
    ),
    Case(
        "26",
        GLM,
        "<tool_call>grep<arg_key>limit</arg_key><arg_value>4</arg_value>"
        "<arg_key>whole</arg_key><arg_value>true</arg_value></tool_call>",
        [call("grep", limit=4, whole=True)],
    ),
    Case(
        "27",
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="grep">\n<parameter name="limit">1</parameter>\n'
        '</invoke>\n<invoke name="write">\n<parameter name="path">a</parameter>\n</invoke>'
        "\n</minimax:tool_call>",
        [call("grep", limit=1), call("write", path="a")],
    ),
    Case(
        "28",
        QWEN_CODER,
        coder(
            "grep",
            ("pattern", "7"),
            ("limit", "7"),
            ("whole", "True"),
            ("paths", '["7", 7]'),
            ("options", '{"a": null}'),
            ("near", "None"),
            ("new", "[7]"),
        ),
        [
            call(
                "grep",
                pattern="7",
                limit=7,
                whole=True,
                paths=["7", 7],
                options={"a": None},
                near=None,
                new=[7],
            )
        ],
    ),
    Case(
        "29",
        QWEN_CODER,
        coder("ls") + coder("grep", ("limit", "5")),
        [call("ls"), call("grep", limit=5)],
    ),
    Case(
        "30",
        DEEPSEEK_31,
        "I had better look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ls<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [thought("I had better look."), call("ls")],
        {"in_reasoning": True},
    ),
    Case(
        "30b",
        QWEN_CODER,
        f"A <tool_call> might do.\n{coder('grep', ('limit', '1'))}\n</think>\n\nThere.",
        [thought("A <tool_call> might do."), call("grep", limit=1), text("There.")],
        {"in_reasoning": True},
    ),
    Case(
        "31",
        HARMONY,
        "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant to=functions.grep"
        '<|channel|>commentary json<|message|>{"limit": 1}<|call|>',
        [thought("Ask."), call("grep", limit=1)],
    ),
    Case(
        "31b",
        HARMONY,
        "<|channel|>final<|channel|>commentary<|message|>Hi.<|end|><|start|><|end|>",
        [text("Hi.")],
    ),
    Case("a", LLAMA, '{"name": "grep", "parameters": {"limit": 1}}', [call("grep", limit=1)]),
    Case(
        "b",
        LLAMA,
        '<|python_tag|>{"name": "grep", "parameters": {"limit": 1}}',
        [call("grep", limit=1)],
    ),
    Case(
        "c",
        LLAMA,
        '<|python_tag|>brave_search.call(query="it\'s \\"so\\" \\u00e9")',
        [call("brave_search", query='it\'s "so" é')],
    ),
    Case(
        "d",
        LLAMA,
        "[grep(pattern='a, b)', limit=3, whole=True, paths=[1, {'x': None}], options={}), ls()]",
        [call("grep", pattern="a, b)", limit=3, whole=True, paths=[1, {"x": None}], options={})],
    ),
    Case(
        "d2",
        msgspec.structs.replace(LLAMA, one_call=False),
        '<|python_tag|>[grep(limit=-1), ls( ), grep(pattern="""a"b\nc\\\\""")]',
        [call("grep", limit=-1), call("ls"), call("grep", pattern='a"b\nc\\')],
    ),
    Case("e", LLAMA, "[1] is a list, grep(x) is not.", [text("[1] is a list, grep(x) is not.")]),
    Case("f", LLAMA, "<|python_tag|>print(1)", [broken("print", "unfinished")]),
    Case(
        "g",
        DEEPSEEK,
        "<think>\nhm\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>grep"
        '\n```json\n{"limit": 1}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ls\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [thought("hm"), call("grep", limit=1), call("ls")],
    ),
    Case(
        "h",
        MISTRAL,
        '[THINK]Look[/THINK]Yes.[TOOL_CALLS]grep[CALL_ID]abcdefghi[ARGS]{"limit": 1}',
        [thought("Look"), text("Yes."), call("grep", limit=1)],
    ),
    Case(
        "i",
        HARMONY,
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>final<|message|>F.",
        [thought("A."), text("F.")],
    ),
    Case("j", HARMONY, "<|channel|>analysis<|message|>never end", [thought("never end")], CUT),
    Case(
        "k",
        GLM,
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>    a </arg_value> b"
        "</arg_value>\n</tool_call>",
        [call("write", text="    a </arg_value> b")],
    ),
    Case(
        "l", GLM, "Write <tool_call>, and that is it.", [text("Write <tool_call>, and that is it.")]
    ),
    Case("m", QWEN_CODER, "<tool_call>\n<func", [broken(None)], CUT),
    Case("n", MISTRAL_LIST, '[TOOL_CALLS][{"name": "grep", "argu', [broken("grep")], CUT),
]
