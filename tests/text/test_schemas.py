import pytest

from agentserve import wire
from agentserve.sessions.schemas import SchemaChecker, validate_schema


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
