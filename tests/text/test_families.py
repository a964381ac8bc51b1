"""What the chat templates of the families do to an agent's history, and what they may not do."""

import importlib
import importlib.util
import json

import family_templates
import pytest
from compiling import Compiling
from scanned import Scanned
from session_rig import convert

from agentserve import families, wire
from agentserve.errors import InvalidRequest
from agentserve.sessions.compose import Call, Conversation, Message
from agentserve.sessions.grammar import structural_tag
from agentserve.sessions.toolformat import FORMATS, JSON, MISTRAL, MISTRAL_LIST, choose, detect

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


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_the_grammar_of_a_family_takes_its_calls_and_no_others(format, factory):
    tools = [
        wire.Tool(
            "grep",
            {
                "type": "object",
                "properties": {"pattern": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["pattern"],
            },
        ),
        wire.Tool("ls", {"type": "object", "properties": {}}),
    ]
    good = [[("grep", {"pattern": "a b", "limit": 3})], [("ls", {})]]
    if not format.one_call:
        good.append([*good[0], *good[0]])
    bad = [[("grep", {"patern": "a"})], [("greb", {"pattern": "a"})], [("rm", {})]]
    for choice in ("auto", "required"):
        spec = structural_tag(tools, choice, format)
        for calls in good:
            assert takes(factory, spec, format.form.write(calls)), (choice, calls)
        for calls in bad:
            assert not takes(factory, spec, format.form.write(calls)), (choice, calls)


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bytes")
    directory.joinpath("tokenizer.json").write_text(json.dumps(families.byte_pipeline("")))
    directory.joinpath("generation_config.json").write_text('{"eos_token_id": [256]}')
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
