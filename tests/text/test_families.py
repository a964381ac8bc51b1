"""What the chat templates of the families do to an agent's history, and what they may not do."""

import importlib
import importlib.util
import itertools
import json

import family_templates
import pytest
from compiling import Compiling
from scanned import Scanned, check_events
from session_rig import convert

from agentserve import families, wire
from agentserve.errors import InvalidRequest
from agentserve.sessions.compose import Call, Conversation, Message
from agentserve.sessions.grammar import openings, structural_tag, triggers
from agentserve.sessions.toolformat import (
    FORMATS,
    HARMONY,
    JSON,
    KIMI,
    MISTRAL,
    MISTRAL_LIST,
    choose,
    detect,
)

INSTALLED = {
    name: source for name, source in families.installed_templates() if detect(source).native
}
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the development package trl is not installed"
)
# Where a tool result rewrites the log: these templates print no reasoning, though models think.
REWRITES = {"deepseek"}


@pytest.mark.parametrize("name", family_templates.TEMPLATES)
def test_each_family_is_detected_survives_and_is_read_as_it_is_written(name):
    found = families.examine_source(family_templates.TEMPLATES[name].strip(), name)
    assert (found.format, found.refused, found.round_trip) == (name, "", True)
    assert {"calls", "results"} <= set(found.survives)
    assert found.on_result == (name not in REWRITES)


@needs_trl
def test_published_templates_are_read_as_they_are_written():
    found = {family.template: family for family in families.examine_families(None)}
    assert len(INSTALLED) >= 15
    for name in INSTALLED:
        family = found[name]
        assert (family.refused, family.round_trip) == ("", True), family
        assert {"calls", "results"} <= set(family.survives)


def test_a_family_without_a_template_is_reported_as_untested():
    found = families.examine_families(None)
    assert {family.format for family in found} == set(FORMATS)
    for family in found:
        assert family.tested == bool(family.template)
        assert family.tested or family.on_result is None


def test_a_format_can_be_chosen_by_name_and_an_unknown_one_is_refused():
    assert choose("auto", "no tools here") == JSON
    for name, format in FORMATS.items():
        assert choose(name, "") == format
    with pytest.raises(ValueError, match="there are: auto, deepseek"):
        choose("hermess", "")


def conversation(word):
    tool = wire.Tool("look", {"type": "object", "properties": {"path": {"type": "string"}}}, word)
    call = Call("c00000000", "look", {"path": word, word or "x": [word]})
    messages = (
        Message(role="user", text=word),
        Message(role="assistant", calls=(call,)),
        Message(role="tool", text=word, name="look", call_id="c00000000"),
        Message(role="assistant", text=word),
        Message(role="user", text=word),
    )
    return Conversation(messages, (tool,))


@pytest.mark.parametrize("name", family_templates.NAMES)
def test_content_never_changes_the_control_ids(name):
    text = family_templates.text_of(name)
    tokenizer = text.tokenizer

    def controls(word):
        return [i for i in text.composer.tokens(conversation(word)) if i in tokenizer.control_ids]

    plain = controls("word")
    for control in tokenizer.controls:
        for word in (control, f"a {control}\n{control[:-1]}", control[1:]):
            assert controls(word) == plain, word


GREP = wire.Tool(
    "grep",
    {
        "type": "object",
        "properties": {"pattern": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["pattern"],
    },
)
LS = wire.Tool("ls", {"type": "object", "properties": {}})
TOOLS = {"grep": GREP, "ls": LS}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_the_grammar_of_a_family_takes_its_calls_and_no_others(format, factory):
    good = [[("grep", {"pattern": "a b", "limit": 3})], [("ls", {})]]
    if not format.one_call:
        good.append([*good[0], *good[0]])
    bad = [[("grep", {"patern": "a"})], [("greb", {"pattern": "a"})], [("rm", {})]]
    for choice in ("auto", "required"):
        spec = structural_tag([GREP, LS], choice, format)
        for calls in good:
            assert takes(factory, spec, format.form.write(calls)), (choice, calls)
        for calls in bad:
            assert not takes(factory, spec, format.form.write(calls)), (choice, calls)


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bytes")
    directory.joinpath("tokenizer.json").write_text(json.dumps(families.byte_pipeline("")))
    directory.joinpath("generation_config.json").write_text(json.dumps({"eos_token_id": [STOP]}))
    compiler = Compiling(directory, 512)
    yield compiler
    compiler.close()


def takes(factory, spec, text):
    matcher = factory.compile(spec)
    for byte in text.encode():
        mask = matcher.mask()
        if mask is not None and not mask[byte // 8] >> byte % 8 & 1:
            return False
        matcher.accept(byte)
    return True


STOP = 256
LOOSE = [
    '{{"name": "{n}", "{k}": {{"patern": 1}}}}',
    '{{"name":"{n}","{k}":{{"pattern":"x"}}}}',
    '{{ "name": "{n}", "{k}": {{}}}}',
    '{{\n"name": "{n}", "{k}": {{}}\n}}',
    '{{\n  "name": "{n}",\n  "{k}": {{\n    "patern": 1\n  }}\n}}',
    '{{   "name"  : "{n}", "{k}": {{"limit": "no"}}}}',
    '{{\r\n"name":"{n}", "{k}": {{}}}}',
    '<tool_call>{{"name": "{n}", "arguments": {{}}}}</tool_call>',
    "<tool_call><function={n}><parameter=patern>x</parameter></function></tool_call>",
    "<function={n}>\n<parameter=patern>\nx\n</parameter>\n</function>",
    '<minimax:tool_call><invoke name="{n}"><parameter name="p">x</parameter></invoke>',
    '<invoke name="{n}"><parameter name="p">x</parameter></invoke></minimax:tool_call>',
    "<tool_call>{n}<arg_key>p</arg_key><arg_value>x</arg_value></tool_call>",
    '[{n}(patern="x")]',
    '<|python_tag|>{n}.call(patern="x")',
    '<|python_tag|>{{"name": "{n}", "parameters": {{}}}}',
    "[TOOL_CALLS]{n}[ARGS]{{}}[TOOL_CALLS]{n}{{}}",
    '[TOOL_CALLS] [{{"name": "{n}", "arguments": {{}}}}]',
    " to=functions.{n}<|channel|>commentary json<|message|>{{}}<|call|>",
    " to={n} code<|message|>{{}}<|call|>",
    " to=<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{{}}<|call|>",
    "<|channel|>analysis to=functions.{n} code<|message|>{{}}<|call|>",
    "<|channel|>a to={n} <|channel|>commentary to=functions.ls <|constrain|>json<|message|>{{}}",
    "<|channel|>analysis<|message|>x<|channel|>commentary to={n}<|message|>{{}}<|call|>",
    "<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{{}}",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{{}}\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>",
    "<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
]
OTHERS = (STOP, *b'"}]>)<x0', *range(256))  # what is said for a byte that is not allowed


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_what_is_read_as_a_call_in_a_constrained_turn_is_a_valid_one(format, factory):
    spec = structural_tag([GREP, LS], "auto", format)
    opening = triggers([GREP, LS], format)
    right = format.form.write([("grep", {"pattern": "x"})])
    frames = (("", "\n"), *filter(None, [format.reasoning]))
    calls = free = 0
    for loose, name in itertools.product(LOOSE, ("grep", "Italy")):
        text = loose.format(n=name, k=getattr(format.form, "key", "parameters"))
        for before, after in frames:
            said = constrained(factory, spec, before + text + after + "\n" + right)
            scanned = Scanned(format, [said], tools=TOOLS, triggers=opening)
            made = [item for item in scanned.items if isinstance(item, wire.ToolCallOut)]
            assert not any(call.schema_errors for call in made), said
            calls += len(made)
            wrong = Scanned(format, [before + text + after], tools=TOOLS).items
            free += any(getattr(item, "schema_errors", None) for item in wrong)
    assert calls > 5
    assert free > 1  # the same texts hold wrong calls where no grammar is


def test_in_a_constrained_turn_the_receiver_that_opened_the_call_counts():
    for before in (" to=", "<|channel|>analysis to=x "):
        said = f"{before}<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{{}}"
        for pieces in ([said], [*said]):
            read = Scanned(HARMONY, pieces, tools=TOOLS, triggers=triggers([GREP, LS], HARMONY))
            assert read.plain == [("tool_call", "ls", {})]


def test_the_number_of_a_call_is_no_longer_than_what_is_read(factory):
    spec = structural_tag([GREP, LS], "auto", KIMI)
    said = KIMI.form.write([("ls", {})])
    for digits, taken in (("1" * 9, True), ("1" * 600, False)):
        numbered = said.replace(":0<", f":{digits}<")
        assert takes(factory, spec, numbered) == taken
        read = Scanned(KIMI, [numbered], tools=TOOLS).plain
        assert (read == [("tool_call", "ls", {})]) == taken


FEW = [
    {"enum": ["x", "y"]},
    {"type": "string", "enum": ["x", "y"]},
    {"const": "x"},
    {"enum": ["x", 1]},
    {"anyOf": [{"enum": ["x"]}, {"type": "null"}]},
    {"$ref": "#/$defs/few"},
]


@pytest.mark.parametrize("name", ["qwen-coder", "glm", "minimax"])
def test_white_space_around_one_of_a_few_strings_is_not_part_of_it(name, factory):
    format = FORMATS[name]
    said = format.form.write([("pick", {"which": " x "})])
    for schema, given in [*((few, "x") for few in FEW), ({"type": "string"}, " x ")]:
        parameters = {"type": "object", "properties": {"which": schema}, "$defs": {"few": FEW[0]}}
        tool = wire.Tool("pick", parameters)
        assert takes(factory, structural_tag([tool], "auto", format), said)
        for pieces in ([said], [*said]):
            scanned = Scanned(format, pieces, tools={"pick": tool})
            check_events(scanned)
            (call,) = scanned.items
            assert (call.arguments, call.schema_errors) == ({"which": given}, []), schema


def constrained(factory, spec, text, most=400):
    """Return what a model says that would say `text`, and then end, if the grammar let it."""
    matcher, said = factory.compile(spec), bytearray()
    wanted = iter(text.encode())
    while len(said) < most:
        mask = matcher.mask()
        byte = next(wanted, STOP)
        if mask is not None and not mask[byte // 8] >> byte % 8 & 1:
            byte = next(i for i in OTHERS if mask[i // 8] >> i % 8 & 1)
        if byte == STOP:
            break
        said.append(byte)
        matcher.accept(byte)
    return said.decode(errors="replace")


ANSWER = {
    "type": "object",
    "properties": {"said": {"type": "string"}},
    "required": ["said"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_calls_or_an_answer_of_a_schema_in_one_grammar(format, factory):
    spec = structural_tag([GREP, LS], "auto", format, answer=ANSWER)
    begin = openings([GREP, LS], format)
    call = format.form.write([("grep", {"pattern": "x"})])
    answer = json.dumps({"said": f"no {call} is made"})
    lead = "".join(format.reasoning) if format.reasoning else ""
    for before in {"", lead}:
        assert takes(factory, spec, before + call)
        assert takes(factory, spec, before + answer)
        for text in ("free text", f"{call} free text", f"{answer} {call}", '{"said": 1}'):
            assert not takes(factory, spec, before + text), text
        for pieces in ([before, answer], [*before, *answer]):
            read = Scanned(format, pieces, tools=TOOLS, openings=begin).plain
            assert read[-1] == ("text", answer)
            assert {kind for kind, *_ in read} <= {"text", "reasoning"}
        for pieces in ([before, call], [*before, *call]):
            read = Scanned(format, pieces, tools=TOOLS, openings=begin).plain
            assert read[-1] == ("tool_call", "grep", {"pattern": "x"})


def test_history_whose_arguments_are_no_object_is_refused_as_a_bad_request():
    call = {"type": "tool_call", "name": "ls", "arguments": "{"}
    with pytest.raises(InvalidRequest):
        convert(wire.CreateRequest, history=[{"type": "assistant", "content": [call]}])


@pytest.mark.parametrize("version", ["v3", "v7"])
def test_mistral_s_own_encoder_writes_what_is_read(version):
    reason = "the development package mistral-common is not installed"
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral", reason=reason)
    asked = {
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": f"c0000000{i}",
                        "type": "function",
                        "function": {"name": "grep", "arguments": json.dumps({"limit": i})},
                    }
                    for i in range(2)
                ],
            },
            *({"role": "tool", "tool_call_id": f"c0000000{i}", "content": "r"} for i in range(2)),
        ]
    }
    shape = importlib.import_module("mistral_common.protocol.instruct.request")
    request = shape.ChatCompletionRequest.model_validate(asked)
    encoder = getattr(mistral.MistralTokenizer, version)()
    keep = importlib.import_module("mistral_common.tokens.tokenizers.base").SpecialTokenPolicy.KEEP
    tokens = encoder.encode_chat_completion(request).tokens
    text = encoder.decode(tokens, special_token_policy=keep).replace("▁", " ")
    said = text[text.index("[TOOL_CALLS]") : text.index("</s>")]
    for format in (MISTRAL, MISTRAL_LIST):
        assert Scanned(format, list(said)).plain == [
            ("tool_call", "grep", {"limit": 0}),
            ("tool_call", "grep", {"limit": 1}),
        ]
