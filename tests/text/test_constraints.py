import json

import msgspec
import pytest

from agentserve import wire
from agentserve.sessions.constraints import MOST_BYTES, Constraint, Constraints
from agentserve.sessions.grammar import structural_tag
from agentserve.sessions.toolformat import HERMES, JSON

DEFAULTS = {"choice": "auto", "parallel": True, "in_reasoning": False, "answer": None}
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}}
CHANGES = [
    {"choice": "required"},
    {"choice": wire.NamedTool("ls")},
    {"parallel": False},
    {"in_reasoning": True},
    {"answer": ANSWER},
    {"tools": ()},
    {"tools": (), "answer": ANSWER},
]


def tool(name="ls", **properties):
    return wire.Tool(name, {"type": "object", "properties": properties})


LS = tool()


def of(constraints, tools=(LS,), **changes):
    return constraints.of(tools, **DEFAULTS | changes)


@pytest.mark.parametrize("format", [JSON, HERMES], ids=["json", "hermes"])
def test_what_a_constraint_depends_on_is_what_it_is_remembered_by(format):
    constraints = Constraints(format)
    made = [of(constraints, **change) for change in [{}, *CHANGES]]
    fresh = [of(Constraints(format), **change) for change in [{}, *CHANGES]]
    assert made == fresh
    again = [of(constraints, **change) for change in [{}, *CHANGES]]
    assert all(one is before for one, before in zip(again, made, strict=True))
    assert made[0].spec == structural_tag([tool()], "auto", format)
    assert made[0].triggers
    assert not made[0].openings
    assert made[5].openings
    assert made[6] == Constraint()


def test_tools_that_differ_anywhere_have_constraints_of_their_own():
    constraints = Constraints(HERMES)
    specs = {
        of(constraints, [one]).spec
        for one in (tool(), tool("dir"), tool(path={"type": "string"}), tool(path={"enum": [1]}))
    }
    assert len(specs) == 4
    equal = [msgspec.convert(json.loads(wire.encode(tool(path={}))), wire.Tool) for _ in range(2)]
    assert of(constraints, [equal[0]]) is of(constraints, [equal[1]])


def test_what_is_large_is_made_anew():
    constraints = Constraints(HERMES)
    large = tool(path={"enum": ["x" * MOST_BYTES]})
    assert of(constraints, [large]) is not of(constraints, [large])
    assert of(constraints, [large]) == of(constraints, [large])


CLOSED = {"type": "object", "properties": {"n": {}}}


@pytest.mark.parametrize(
    ("answer", "alike"),
    [
        (CLOSED, False),
        ({**CLOSED, "additionalProperties": False, "required": ["n"]}, False),
        ({"type": "array"}, False),
        ({"type": "string"}, False),
        ({"type": ["integer", "null"]}, False),
        ({"enum": [1, {"n": 1}]}, False),
        ({"const": "name"}, False),
        ({}, True),
        ({"type": "object"}, True),
        ({"type": ["object", "null"], "properties": {"n": {}}}, True),
        ({"type": "object", "properties": {"n": {}, "name": {}}}, True),
        ({**CLOSED, "additionalProperties": True}, True),
        ({**CLOSED, "additionalProperties": {}}, True),
        ({**CLOSED, "patternProperties": {"^n": {}}}, True),
        ({**CLOSED, "anyOf": [{}]}, True),
        ({"enum": [{"name": "ls", "arguments": {}}]}, True),
        ({"const": {"name": 1}}, True),
        ({"type": "object", "enum": [{}]}, True),
    ],
)
def test_an_answer_that_may_look_like_a_bare_call_leaves_the_grammar_to_the_calls(answer, alike):
    bare, tagged = of(Constraints(JSON), answer=answer), of(Constraints(HERMES), answer=answer)
    assert bare.answer_free is alike
    assert (bare == msgspec.structs.replace(of(Constraints(JSON)), answer_free=True)) is alike
    assert bool(bare.openings) is not alike
    assert tagged.openings
    assert not tagged.answer_free
