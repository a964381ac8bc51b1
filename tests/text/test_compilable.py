"""Which parts of a schema the grammar enforces: what is said of them is what the compiler does."""

import json

import pytest
import text_models
from compiling import Compiling

from agentserve.sessions.compilable import compilable, warnings, whole
from agentserve.sessions.grammar import response_tag

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def of(**properties):
    return {"type": "object", "properties": properties}


def array(**more):
    return {"type": "array", **more}


# A schema, a value that breaks it, one that does not.
ENFORCED = {
    "type": (STRING, 1, "a"),
    "types": ({"type": ["string", "null"], "maxLength": 1}, "ab", None),
    "enum": ({"enum": ["a", 1]}, "b", 1),
    "const": ({"const": 1}, 2, 1),
    "properties": (of(a=INTEGER), {"a": "x"}, {"a": 1}),
    "required": (of(a=INTEGER, b=INTEGER) | {"required": ["a"]}, {"b": 1}, {"a": 1}),
    "undeclared": (of(a=INTEGER), {"z": 1}, {}),
    "additionalProperties": (
        of(a=INTEGER) | {"additionalProperties": INTEGER},
        {"z": ""},
        {"z": 1},
    ),
    "patternProperties": (
        of(a=INTEGER) | {"patternProperties": {"^x": INTEGER}, "additionalProperties": False},
        {"y": 1},
        {"a": 1, "xy": 1},
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^x"}}, {"y": 1}, {"x1": 1}),
    "no word about properties": ({"type": "object"}, [], {"any": {"thing": 1}}),
    "minProperties": ({"type": "object", "minProperties": 2}, {"a": 1}, {"a": 1, "b": 2}),
    "maxProperties": (of(a=INTEGER, b=INTEGER) | {"maxProperties": 1}, {"a": 1, "b": 1}, {"b": 1}),
    "unevaluatedProperties": (of(a=INTEGER) | {"unevaluatedProperties": False}, {"z": 1}, {"a": 1}),
    "items": (array(items=INTEGER), ["x"], [1]),
    "no word about items": (array(), {}, [1, "a"]),
    "prefixItems": (array(prefixItems=[INTEGER, STRING]), ["x", 1], [1, "x"]),
    "no further items": (array(prefixItems=[INTEGER], items=False), [1, 2], [1]),
    "minItems": (array(items=INTEGER, minItems=2), [1], [1, 2]),
    "maxItems": (array(items=INTEGER, maxItems=1), [1, 2], [1]),
    "minLength": (STRING | {"minLength": 2}, "a", "ab"),
    "maxLength": (STRING | {"maxLength": 1}, "ab", "a"),
    "pattern": (STRING | {"pattern": "^a+$"}, "ab", "aa"),
    "pattern inside": (STRING | {"pattern": "b"}, "c", "abc"),
    "pattern at the start": (STRING | {"pattern": "^a|c$"}, "b", "ab"),
    "format": (STRING | {"format": "date"}, "monday", "2024-01-02"),
    "format email": (STRING | {"format": "email"}, "a", "ann@example.com"),
    "minimum": (INTEGER | {"minimum": 3}, 2, 3),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 0.5}, 0.5, 0.4),
    "multipleOf": (INTEGER | {"multipleOf": 3}, 4, 3),
    "anyOf": ({"anyOf": [STRING, INTEGER]}, [], 1),
    "one allOf": ({"allOf": [STRING]}, 1, "a"),
    "$ref": ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}}, "a", 1),
    "recursion": (of(next={"$ref": "#"}), {"next": 1}, {"next": {"next": {}}}),
}
UNENFORCED = {
    "not": ({"not": STRING}, "a", 1),
    "then": (
        of(a=INTEGER, b=INTEGER) | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"a": 1},
        {"b": 1},
    ),
    "dependentRequired": (
        of(a=INTEGER, b=INTEGER) | {"dependentRequired": {"a": ["b"]}},
        {"a": 1},
        {"b": 1},
    ),
    "uniqueItems": (array(items=INTEGER, uniqueItems=True), [1, 1], [1]),
    "contains": (array(contains=INTEGER), ["x"], [1]),
    "minContains": (array(contains=INTEGER, minContains=2), [1], [1, 2]),
    "maxLength": (STRING | {"pattern": "^a+$", "maxLength": 1}, "aa", "a"),
    "minimum": ({"minimum": 3}, 2, "a"),
    "required": ({"required": ["a"]}, {"b": 1}, {"a": 1}),
    "anyOf": (
        of(a=INTEGER, b=INTEGER) | {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"a": 1},
        {"b": 1},
    ),
    "oneOf": ({"oneOf": [INTEGER, {"type": "number"}]}, 1, 1.5),
    "allOf": ({"allOf": [of(a=INTEGER), {"required": ["a"]}]}, {"b": 1}, {"a": 1}),
    "maximum": ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}, "maximum": 3}, 4, 3),
    "$ref": ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", **INTEGER}}}, "a", 1),
    "$dynamicRef": (
        {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", **INTEGER}}},
        "a",
        1,
    ),
}
BEYOND = [  # keyword, schema, a value that breaks it if there is one, one that does not
    *(
        (key, {"type": kind} | {key: sign * size}, sign * -1, None)
        for kind in ("integer", "number")
        for size in (2**63, 2**70, 1e300, 10**400)
        for key, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1),
                          ("exclusiveMaximum", -1))
    ),
    ("minimum", {"type": ["integer", "null"], "minimum": 2**70}, 1, None),
    ("maximum", INTEGER | {"maximum": 2**70}, None, 5),
    ("exclusiveMinimum", INTEGER | {"exclusiveMinimum": 2**63 - 1}, 1, None),
    ("exclusiveMaximum", INTEGER | {"exclusiveMaximum": -(2**63)}, 1, None),
    ("minimum", INTEGER | {"minimum": 1.5}, 1, 2),
    ("maximum", STRING | {"maximum": 10**400}, None, "a"),
    *(
        (key, schema | {key: size}, value if key.startswith("min") else None,
         None if key.startswith("min") else value)
        for size in (2**31, 2**64, 10**400)
        for schema, value, keys in ((STRING, "a", ("minLength", "maxLength")),
                                    (array(items=INTEGER), [1], ("minItems", "maxItems")),
                                    (of(a=INTEGER), {"a": 1}, ("minProperties", "maxProperties")))
        for key in keys
    ),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, 0.7, 1.5),
    ("multipleOf", INTEGER | {"multipleOf": 2000}, 3, 4000),
    ("multipleOf", INTEGER | {"multipleOf": 1.5}, 2, 3),
    ("multipleOf", INTEGER | {"multipleOf": 10**400}, 3, 0),
    ("multipleOf", INTEGER | {"multipleOf": 3, "minimum": 5}, 7, 6),
    ("enum", {"enum": ["a", 10**400]}, "b", "a"),
    ("const", {"const": [{"a": -(10**400)}]}, "b", None),
]  # fmt: skip
UNCHECKED = {
    r"^\p{L}+$": ("1", "a"),
    r"^(a|b)\1$": ("ab", "aa"),
    r"^(?=.*[0-9])[a-z0-9]+$": ("a", "a1"),
    r"\bword\b": ("swords", "a word"),
}


@pytest.fixture(scope="module")
def takes():
    compiler = Compiling(text_models.smollm(), text_models.tokenizer("smollm2").vocab_size)

    def taken(schema, value):
        matcher = compiler.compile(response_tag(schema))
        for token in text_models.tokenizer("smollm2").encode_text(json.dumps(value)):
            mask = matcher.mask()
            if mask is not None and not mask[token // 8] >> token % 8 & 1:
                return False
            matcher.accept(token)
        return matcher.complete

    yield taken
    compiler.close()


@pytest.mark.parametrize("case", ENFORCED)
def test_what_is_not_named_is_enforced(case, takes):
    schema, bad, good = ENFORCED[case]
    assert compilable(schema)[1:] == ([], [])
    assert not takes(schema, bad)
    assert takes(schema, good)


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_what_the_grammar_does_not_enforce_is_named(keyword, takes):
    schema, bad, good = UNENFORCED[keyword]
    assert keyword in compilable(schema).unenforced
    assert takes(schema, bad)
    assert takes(schema, good)


@pytest.mark.parametrize(("keyword", "schema", "bad", "good"), BEYOND)
def test_numbers_that_the_compiler_cannot_take_are_named_and_left_out(
    keyword, schema, bad, good, takes
):
    assert compilable(schema)[1:] == ([keyword], [])
    assert warnings("here", of(a=schema)) == [
        f"here: checked only once it is generated: properties.a.{keyword}"
    ]
    assert all(takes(schema, value) for value in (bad, good) if value is not None)


def test_numbers_at_the_limits_are_enforced(takes):
    for schema, bad, good in (
        (INTEGER | {"minimum": 2**63 - 2}, 2**63 - 3, 2**63 - 2),
        (INTEGER | {"exclusiveMaximum": 2 - 2**63}, 0, 1 - 2**63),
        ({"type": "number", "minimum": 2**62}, 1, 2**70),
        (STRING | {"minLength": 2.0, "default": 10**400, "examples": [{"a": 10**400}]}, "a", "ab"),
    ):
        assert compilable(schema)[1:] == ([], [])
        assert not takes(schema, bad)
        assert takes(schema, good)


@pytest.mark.parametrize("pattern", UNCHECKED)
def test_patterns_that_cannot_be_compiled_are_named_and_allow_any_text(pattern, takes):
    bad, good = UNCHECKED[pattern]
    schema = STRING | {"pattern": pattern}
    assert compilable(schema).unchecked == ["pattern"]
    assert takes(schema, bad)
    assert takes(schema, good)
    names = {"type": "object", "patternProperties": {pattern: INTEGER}}
    names["additionalProperties"] = False
    assert compilable(names).unchecked == [f"patternProperties.{pattern}"]
    assert takes(names, {good: 1})


def test_paths_lead_through_the_schema_and_names_are_not_keywords():
    inner = of(pattern={"not": STRING}, items={"anyOf": [{"type": "string", "pattern": r"\p{L}"}]})
    made = compilable(of(uniqueItems=array(items=inner)))
    assert made.unenforced == ["properties.uniqueItems.items.properties.pattern.not"]
    assert made.unchecked == ["properties.uniqueItems.items.properties.items.anyOf.0.pattern"]


def test_a_tool_without_named_arguments_has_none():
    for parameters in ({}, {"type": "object"}, of()):
        made = compilable(parameters, arguments=True).schema
        assert made.get("additionalProperties", False) is False


def test_a_warning_names_a_few_paths_and_counts_the_rest():
    assert warnings("here", of(a=STRING)) == []
    many = of(**{f"p{i}": {"not": STRING} for i in range(30)}, q=STRING | {"pattern": r"\b"})
    first, second = warnings("tools.t.parameters", many)
    assert first.startswith(
        "tools.t.parameters: checked only once it is generated: properties.p0.not"
    )
    assert first.endswith(" and 22 more")
    assert second == "tools.t.parameters: neither enforced nor checked: properties.q.pattern"


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("^a$", "^a$"),
        ("a", ".*a.*"),
        ("^a", "^a.*"),
        (r"a\$", r".*a\$.*"),
        ("^a|b$", "(^a.*|.*b$)"),
        ("^(a|b)$", "^(a|b)$"),
        ("[|]", ".*[|].*"),
        ("", ".*.*"),
    ],
)
def test_a_pattern_is_searched_for_as_in_json_schema(pattern, wanted):
    assert whole(pattern) == wanted
