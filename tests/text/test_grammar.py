import json

import numpy as np
import pytest
import text_models
from compiling import Compiling

from agentserve import wire
from agentserve.errors import BadToolSchema
from agentserve.sessions.grammar import response_tag, structural_tag
from agentserve.sessions.schemas import validate_schema
from agentserve.sessions.toolformat import HERMES, JSON

GREP = wire.Tool(
    "grep",
    {
        "type": "object",
        "properties": {"pattern": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["pattern"],
    },
)
READ = wire.Tool("read", {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}})
TOOLS = (GREP, READ)
EXTRA = 64  # logits beyond the vocabulary


@pytest.fixture(scope="module")
def factories():
    compilers = {
        name: Compiling(
            text_models.DIRECTORIES[name](), text_models.tokenizer(name).vocab_size + EXTRA
        )
        for name in ("smollm2", "qwen3", "sentencepiece")
    }
    yield compilers
    for compiler in compilers.values():
        compiler.close()


def allowed(matcher):
    """Return the set of allowed ids, or None when any is."""
    mask = matcher.mask()
    if mask is None:
        return None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def follow(factory, name, spec, ids):
    """Return (how many ids were allowed, the ids allowed after them)."""
    matcher = factory.compile(spec)
    for done, token in enumerate(ids):
        options = allowed(matcher)
        if options is not None and token not in options:
            return done, options
        matcher.accept(token)
    return len(ids), allowed(matcher)


def takes(factory, name, spec, text):
    ids = text_models.tokenizer(name).encode_text(text)
    done, _ = follow(factory, name, spec, ids)
    return done == len(ids)


@pytest.mark.parametrize(
    ("format", "name"), [(JSON, "smollm2"), (HERMES, "qwen3"), (JSON, "sentencepiece")]
)
def test_auto_is_free_until_a_call_opens(format, name, factories):
    factory, spec = factories[name], structural_tag(TOOLS, "auto", format)
    call = format.call("grep", {"pattern": "x"})
    for text in (
        "plain text",
        f"look:\n{call}",
        f"{call}\n{format.call('read', {'path': 'a'})}\nok",
    ):
        assert takes(factory, name, spec, text)
    assert not takes(factory, name, spec, format.call("grep", {"patern": "x"}))
    assert not takes(factory, name, spec, format.call("grepp", {"pattern": "x"}))
    assert not takes(factory, name, spec, format.call("read", {"path": "c"}))


@pytest.mark.parametrize(("format", "name"), [(JSON, "smollm2"), (HERMES, "qwen3")])
def test_required_and_named_calls_are_forced_from_the_first_token(format, name, factories):
    factory = factories[name]
    grep, read = format.call("grep", {"pattern": "x"}), format.call("read", {"path": "a"})
    for choice in ("required", "read", wire.NamedTool("read")):
        spec = structural_tag(TOOLS, choice, format)
        assert not takes(factory, name, spec, "plain text")
        assert takes(factory, name, spec, grep) == (choice == "required")
        assert takes(factory, name, spec, read)
        assert takes(factory, name, spec, f"{read}\n{read}")
        assert not takes(factory, name, spec, f"{read}\nand text")


@pytest.mark.parametrize(("format", "name"), [(JSON, "smollm2"), (HERMES, "qwen3")])
def test_without_parallel_calls_only_a_stop_token_follows_the_first(format, name, factories):
    tokenizer = text_models.tokenizer(name)
    for choice in ("required", "auto", "grep"):
        spec = structural_tag(TOOLS, choice, format, parallel=False)
        ids = tokenizer.encode_text(format.call("grep", {"pattern": "x"}))
        done, after = follow(factories[name], name, spec, ids)
        assert done == len(ids)
        assert after == set(tokenizer.stop_ids)


def test_reasoning_may_come_before_a_required_call(factories):
    spec = structural_tag(TOOLS, "required", HERMES)
    call = HERMES.call("grep", {"pattern": "x"})
    assert takes(factories["qwen3"], "qwen3", spec, f"<think>\nhm\n</think>\n\n{call}")
    assert not takes(factories["qwen3"], "qwen3", spec, "<think>\nhm\n</think>\n\nno call")


def test_after_a_reasoning_that_the_prompt_has_opened_comes_its_end_and_then_the_constraint(
    factories,
):
    call = HERMES.call("grep", {"pattern": "x"})
    wrong = HERMES.call("grep", {"patern": "x"})
    qwen3 = factories["qwen3"]
    for choice in ("required", "auto"):
        spec = structural_tag(TOOLS, choice, HERMES, in_reasoning=True)
        assert takes(qwen3, "qwen3", spec, f"hm, no\n</think>\n\n{call}")
        assert not takes(qwen3, "qwen3", spec, f"hm\n</think>\n\n{wrong}")
    required = structural_tag(TOOLS, "required", HERMES, in_reasoning=True)
    assert not takes(qwen3, "qwen3", required, "hm\n</think>\n\nno call")
    answer = response_tag({"type": "integer"}, HERMES, in_reasoning=True)
    assert takes(qwen3, "qwen3", answer, "hm\n</think>\n\n12")
    assert not takes(qwen3, "qwen3", answer, "hm\n</think>\n\nx")


def test_reasoning_is_free_of_calls_which_would_be_none_of_the_grammar_s(factories):
    spec = structural_tag(TOOLS, "auto", HERMES)
    for wrong in (HERMES.call("grep", {"patern": "x"}), "<tool_call>"):
        assert not takes(factories["qwen3"], "qwen3", spec, f"<think>\n{wrong}\n</think>\n\ntext")
        assert not takes(factories["qwen3"], "qwen3", spec, f"<think>\nhm\n</think>\n\n{wrong} no")
    assert takes(factories["qwen3"], "qwen3", spec, "<think>\n{} <call>\n</think>\n\ntext")


def test_a_tool_without_arguments_takes_an_empty_object_only(factories):
    for parameters in ({}, {"type": "object"}, {"type": "object", "properties": {}}):
        spec = structural_tag([wire.Tool("now", parameters)], "required", JSON)
        assert takes(factories["smollm2"], "smollm2", spec, JSON.call("now", {}))
        assert not takes(factories["smollm2"], "smollm2", spec, JSON.call("now", {"a": 1}))


def test_a_strict_tool_is_refused_when_a_part_of_its_schema_cannot_be_enforced():
    lax = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    validate_schema(wire.Tool("t", lax))
    with pytest.raises(BadToolSchema, match=r"properties\.a\.not"):
        validate_schema(wire.Tool("t", lax, strict=True))
    validate_schema(wire.Tool("t", GREP.parameters, strict=True))


def test_the_model_s_own_tag_tokens_open_a_constrained_call(factories):
    tokenizer, reference = text_models.tokenizer("qwen3"), text_models.reference("qwen3")
    spec = structural_tag(TOOLS, "auto", HERMES)
    good = reference.encode(HERMES.call("grep", {"pattern": "x"}))
    bad = reference.encode(HERMES.call("grep", {"patern": "x"}))
    assert good[0] in tokenizer.control_ids
    assert follow(factories["qwen3"], "qwen3", spec, good)[0] == len(good)
    assert follow(factories["qwen3"], "qwen3", spec, bad)[0] < len(bad)


def test_control_tokens_and_ids_beyond_the_vocabulary_are_never_allowed(factories):
    for name in ("smollm2", "sentencepiece"):
        tokenizer = text_models.tokenizer(name)
        spec = structural_tag(TOOLS, "auto", JSON)
        for text in ("", "free text", '{"name": "grep", "arguments": {"pattern": "in a string'):
            ids = tokenizer.encode_text(text)
            done, options = follow(factories[name], name, spec, ids)
            assert done == len(ids)
            assert options & tokenizer.control_ids <= set(tokenizer.stop_ids)
            assert max(options) < tokenizer.vocab_size


def test_an_answer_follows_its_json_schema(factories):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    factory = factories["smollm2"]
    assert takes(factory, "smollm2", response_tag(schema), '{"n": 12}')
    assert not takes(factory, "smollm2", response_tag(schema), '{"n": "12"}')
    assert takes(factories["qwen3"], "qwen3", response_tag(schema, HERMES), '{"n": 12}')
    numbers = response_tag({"type": "array", "items": {"type": "integer"}})
    assert takes(factory, "smollm2", numbers, "[1, 2]")
    assert not takes(factory, "smollm2", numbers, '["1"]')


def test_no_tools_or_no_calls_is_no_constraint():
    assert structural_tag((), "auto", JSON) is None
    assert structural_tag(TOOLS, "none", JSON) is None


def test_forced_tokens_that_do_not_fit_end_the_constraint(factories):
    matcher = factories["smollm2"].compile(structural_tag(TOOLS, "required", JSON))
    for token in text_models.tokenizer("smollm2").encode_text("not a call"):
        matcher.accept(token)
    assert matcher.mask() is None


BAD_SPECS = [
    "not json",
    "{}",
    response_tag({"type": "nonsense"}),
    response_tag({"$ref": "#/nowhere"}),
    response_tag({"type": "string", "pattern": "("}),
]


@pytest.mark.parametrize("spec", BAD_SPECS, ids=range(len(BAD_SPECS)))
def test_a_spec_that_cannot_be_compiled_is_a_value_error(spec, factories):
    with pytest.raises(ValueError, match=r"\w+ \w+") as caught:
        factories["smollm2"].compile(spec)
    assert "/project/" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "object"),
        ({"type": "object", "properties": 3}, "not of type 'object'"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "strin"),
        ({"type": "object", "properties": {"a": {"$ref": "http://example/x"}}}, "references"),
        ({"type": "object", "description": "x" * 70_000}, "larger"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(parameters, message):
    with pytest.raises(BadToolSchema, match=message) as caught:
        validate_schema(wire.Tool("grep", parameters))
    assert caught.value.param == "tools.grep.parameters"


def test_a_schema_nested_too_deep_is_refused_at_any_depth():
    for depth in (40, 5000):
        schema = {}
        for _ in range(depth):
            schema = {"not": schema}
        with pytest.raises(BadToolSchema, match="nested deeper"):
            validate_schema(wire.Tool("grep", schema))


def test_usual_schemas_are_accepted_and_compile(factories):
    node = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "word": {"type": "string", "pattern": r"^\p{L}+$"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
    }
    tool = wire.Tool(
        "tree", {"type": "object", "properties": {"root": node}, "$defs": {"node": node}}
    )
    validate_schema(tool)
    validate_schema(GREP)
    for choice in ("auto", "required"):
        spec = structural_tag((tool, GREP), choice, JSON)
        assert json.loads(spec)["type"] == "structural_tag"
        factories["smollm2"].compile(spec)
