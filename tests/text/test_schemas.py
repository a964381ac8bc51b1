import pytest

from agentserve import wire
from agentserve.sessions.compilable import Allowance, pattern_states
from agentserve.sessions.grammar import response_tag, structural_tag
from agentserve.sessions.schemas import SchemaChecker, validate_schema
from agentserve.sessions.toolformat import JSON


def doubled(levels):
    """Return a small schema whose references double at each level."""
    names = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": names | {f"d{levels}": {"type": "object"}}}


def of_a(schema):
    return {"type": "object", "properties": {"a": schema}}


HARD_TO_CHECK = {
    "doubled references": (doubled(40), {}),
    "a reference to itself": ({"$ref": "#"}, {}),
    "a missing reference": (of_a({"$ref": "#/$defs/none"}), {"a": 1}),
    "not a URL": (of_a({"$ref": "#b"}) | {"$id": "http://[::1"}, {"a": 1}),
    "a quotient that overflows": (of_a({"type": "number", "multipleOf": 1e-300}), {"a": 1e300}),
    "pairs": (of_a({"uniqueItems": True}), {"a": [{"b": [i]} for i in range(3000)]}),
    "choices": (
        of_a({"items": {"enum": list(range(5000))}}),
        {"a": [[i] for i in range(5000)]},
    ),
    "a slow pattern": (
        {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
        {"a" * 40 + "b": 1},
    ),
    "a slow pattern of evaluated names": (
        {"patternProperties": {"^(a+)+$": {}}, "unevaluatedProperties": False},
        {"a" * 40 + "b": 1},
    ),
    "a pattern of another dialect": (
        {"patternProperties": {r"^\p{L}": {}}, "additionalProperties": False},
        {"b": 1},
    ),
}


@pytest.mark.parametrize("case", HARD_TO_CHECK)
def test_any_schema_that_is_taken_can_be_applied_to_any_arguments(case):
    parameters, arguments = HARD_TO_CHECK[case]
    tool = wire.Tool("t", parameters)
    validate_schema(tool)
    errors = SchemaChecker({"t": tool}).errors("t", arguments)
    assert all(isinstance(error, str) and "Traceback" not in error for error in errors)


def test_a_check_that_is_cut_short_says_so_and_the_next_one_starts_anew():
    slow, quick = wire.Tool("slow", doubled(40)), wire.Tool("quick", of_a({"type": "string"}))
    checker = SchemaChecker({"slow": slow, "quick": quick})
    (error,) = checker.errors("slow", {})
    assert "too long" in error
    assert checker.errors("quick", {"a": "b"}) == []
    assert checker.errors("quick", {"a": 1}) != []


def test_undeclared_properties_are_errors_where_no_pattern_allows_them():
    tool = wire.Tool("t", of_a({}) | {"additionalProperties": False})
    assert SchemaChecker({"t": tool}).errors("t", {"b": 1}) != []


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("abc", 3),
        (r"\d[a-z\]]\{", 3),
        ("a{3}b", 4),
        ("(ab){2,5}", 15),
        ("((a{3}){3}){3}", 39),
        ("[a-z]?b", 21),
        ("x{0,5}", 100),
        (r"\p{L}+", float("inf")),
        (r"(a)\1", float("inf")),
        (")))", 3),
    ],
)
def test_repetitions_are_counted_as_if_written_out(pattern, states):
    assert pattern_states(pattern) == states


@pytest.mark.parametrize(
    "keyword",
    [
        {"pattern": "[a-z]?" * 60},
        {"pattern": "^(abc|[^x]){5000}$"},
        {"pattern": "(([a-z]{0,10}[0-9]{0,10}){0,5}x)*" * 3},
        {"patternProperties": {"[a-z]?" * 60: {}}},
        {"properties": {f"p{i}": {} for i in range(300)}, "minProperties": 2},
    ],
)
def test_keywords_that_would_hold_up_the_engine_are_left_to_the_grammar_s_freedom(keyword):
    (costly,) = [key for key in keyword if key != "properties"]
    schema = {"type": "object", **keyword}
    spec = response_tag(schema)
    assert costly not in spec or '"patternProperties": {}' in spec
    assert '"type": "object"' in spec


def test_all_tools_of_a_turn_share_one_allowance():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{60}$"}}}
    tools = [wire.Tool(f"t{i}", schema) for i in range(20)]
    spec = structural_tag(tools, "required", JSON)
    assert 1 < spec.count('"pattern"') < 20


def test_usual_patterns_and_formats_stay():
    usual = {
        "day": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        "slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
        "url": {"type": "string", "pattern": "^https?://[^ ]+$"},
        "id": {"type": "string", "format": "uuid"},
        "pattern": {"type": "string"},
    }
    schema = {"type": "object", "properties": usual, "minProperties": 1}
    assert Allowance().compilable(schema) == schema
