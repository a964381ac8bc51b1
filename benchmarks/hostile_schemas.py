"""Schemas and patterns that are meant to harm a grammar compiler: a seeded generator."""

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
LETTERS = ("a", "b", "ab", "[a-z]", "[^x]", ".", r"\d", r"\w", "(ab|a|b)")
CLASSES = (
    r"\p{L}",
    r"\p{Lu}\p{Ll}",
    r"[\u0000-\uffff]",
    "[一-龥]",
    "[😀-🙏]",
    r"[^\u0000-\u001f]",
    r"\X",
)
COUNTS = (2, 20, 200, 2000, 10**5, 10**9)


def schemas(seed: int, count: int) -> Iterator[tuple[str, Schema]]:
    """Yield pairs of a kind and a schema of an object; the kinds come in turn."""
    rng = random.Random(seed)
    kinds = list(KINDS.items())
    for number in range(count):
        name, make = kinds[number % len(kinds)]
        yield name, make(rng)


def of(schema: Any) -> Schema:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"]}


def text(pattern: str) -> Schema:
    return of({"type": "string", "pattern": pattern})


def deep(rng: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(rng.randint(5, 60)):
        schema = of(schema) if rng.random() < 0.5 else {"type": "array", "items": schema}
    return of(schema)


def huge_enum(rng: random.Random) -> Schema:
    values = [
        "".join(rng.choices("abcdef ", k=rng.randint(1, 20)))
        for _ in range(rng.choice(COUNTS[1:4]))
    ]
    return of({"enum": [*dict.fromkeys(values)]})


def nested_quantifiers(rng: random.Random) -> Schema:
    pattern = rng.choice(LETTERS)
    for _ in range(rng.randint(2, 6)):
        pattern = f"({pattern}{rng.choice(LETTERS)}?){rng.choice(('*', '+', '{0,9}', '{3,}', '?'))}"
    return text(pattern * rng.randint(1, 4))


def optional_chain(rng: random.Random) -> Schema:
    return text(f"^{(rng.choice(LETTERS) + '?') * rng.randint(10, 200)}$")


def huge_counts(rng: random.Random) -> Schema:
    count = rng.choice(COUNTS)
    return rng.choice(
        (
            text(f"^({rng.choice(LETTERS)}){{{count}}}$"),
            text(f"^({rng.choice(LETTERS)}){{0,{count}}}y$"),
            of({"type": "string", "minLength": count}),
            of({"type": "array", "items": {"type": "integer"}, "maxItems": count}),
            of({"type": "array", "items": {"type": "array", "minItems": count}, "minItems": count}),
        )
    )


def not_regular(rng: random.Random) -> Schema:
    return text(
        rng.choice(
            (
                r"^(a+)\1$",
                r"^(?=.*[A-Z])(?=.*\d).{8,}$",
                r"(?<!a)b+",
                r"^(?:(a)|b)*\1{3}$",
                r"\bword\b",
                "(?<name>a)\\k<name>",
                "(",
                "[z-a]",
                "a{3,1}",
                "*",
                "(?i)a",
            )
        )
    )


def unicode_classes(rng: random.Random) -> Schema:
    return text(
        "^"
        + "".join(
            rng.choice(CLASSES) + rng.choice(("", "+", "{0,30}")) for _ in range(rng.randint(1, 8))
        )
    )


def alternatives(rng: random.Random) -> Schema:
    words = (
        "".join(rng.choices("ab", k=rng.randint(1, 12))) for _ in range(rng.choice((10, 100, 1000)))
    )
    return text(f"^({'|'.join(words)}){rng.choice(('*', '+', '{2,20}'))}$")


def wild_chain(rng: random.Random) -> Schema:
    return text("".join(f".*{letter}" for letter in rng.choices("abcdefgh", k=rng.randint(3, 60))))


def recursion(rng: random.Random) -> Schema:
    levels = rng.randint(1, 30)
    names = {
        f"d{i}": {
            rng.choice(("allOf", "anyOf", "oneOf")): [
                {"$ref": f"#/$defs/d{rng.choice((i + 1, 0, i))}"} for _ in range(rng.randint(1, 3))
            ]
        }
        for i in range(levels)
    }
    last = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/d0"}, "again": {"$ref": "#"}},
    }
    return of({"$ref": "#/$defs/d0"}) | {"$defs": names | {f"d{levels}": last}}


def contradictions(rng: random.Random) -> Schema:
    return of(
        rng.choice(
            (
                {"allOf": [{"type": "string"}, {"type": "integer"}]},
                {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}, {"not": {}}]},
                {"type": "integer", "minimum": 5, "maximum": 1},
                {"type": "string", "minLength": 9, "maxLength": 2},
                {"type": "string", "const": 3},
                {"enum": []},
                False,
                {"not": {}},
                {"type": "array", "items": False, "minItems": 3},
                {"type": "object", "minProperties": 3, "maxProperties": 1},
            )
        )
    )


def pattern_properties(rng: random.Random) -> Schema:
    patterns = {
        optional_chain(rng)["properties"]["v"]["pattern"][: rng.randint(8, 400)]: {
            "type": "integer"
        }
        for _ in range(rng.randint(1, 4))
    }
    patterns |= {
        rng.choice(LETTERS) * rng.randint(1, 9) + "+": {} for _ in range(rng.randint(0, 4))
    }
    more: Any = rng.choice((False, True, {"type": "string"}))
    return {"type": "object", "patternProperties": patterns, "additionalProperties": more}


def property_counts(rng: random.Random) -> Schema:
    names = {
        f"p{i}": rng.choice(({}, {"type": "string"}, {"type": "integer"}))
        for i in range(rng.randint(5, 600))
    }
    least = rng.randint(1, 9)
    return {
        "type": "object",
        "properties": names,
        "minProperties": least,
        "maxProperties": least + rng.randint(0, 90),
    }


def numbers(rng: random.Random) -> Schema:
    low, high = sorted(rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300) for _ in range(2))
    return of(
        rng.choice(
            (
                {"type": "number", "minimum": low, "maximum": high},
                {"type": "integer", "minimum": int(low), "maximum": int(high)},
                {"type": "integer", "multipleOf": rng.choice((7, 10**6 + 3, 10**18))},
                {"type": "number", "multipleOf": 1e-300},
            )
        )
    )


def ambiguous(rng: random.Random) -> Schema:
    schema: Any = {"type": "string"}
    for _ in range(rng.randint(2, 9)):
        schema = {
            "anyOf": [
                schema,
                {"type": "array", "items": schema},
                {"type": "string", "pattern": "^a*b*a*$"},
            ]
        }
    return of(schema)


def nonsense(rng: random.Random) -> Schema:
    words = (
        "type",
        "properties",
        "items",
        "$ref",
        "pattern",
        "anyOf",
        "format",
        "required",
        "$defs",
        "const",
        "🙂",
        "",
    )

    def value(depth: int) -> Any:
        kind = rng.randint(0, 7 if depth else 4)
        if kind > 5:
            return {rng.choice(words): value(depth - 1) for _ in range(rng.randint(0, 4))}
        if kind == 5:
            return [value(depth - 1) for _ in range(rng.randint(0, 4))]
        return rng.choice(
            (
                None,
                True,
                -1,
                1e308,
                10**30,
                "",
                "#",
                "#/$defs/x",
                "object",
                "string",
                "\ud7ff",
                "x" * 999,
            )
        )

    return {"type": "object", **{rng.choice(words[1:]): value(4) for _ in range(rng.randint(1, 5))}}


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    make.__name__: make
    for make in (
        deep,
        huge_enum,
        nested_quantifiers,
        optional_chain,
        huge_counts,
        not_regular,
        unicode_classes,
        alternatives,
        wild_chain,
        recursion,
        contradictions,
        pattern_properties,
        property_counts,
        numbers,
        ambiguous,
        nonsense,
    )
}
