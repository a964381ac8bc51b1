"""The JSON schema of a function and its calling convention agree."""

import enum
import inspect
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, TypedDict

import jsonschema
import msgspec
import pytest
from agentserve_tools.schema import ArgumentError, Signature
from hypothesis import given, settings
from hypothesis import strategies as st


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: float = 0.0


class Options(TypedDict, total=False):
    depth: int


class Node(msgspec.Struct):
    value: int
    next: "Node | None" = None


TEXT = st.text('aé "\n', max_size=5)
ANNOTATIONS = {
    "integer": (int, st.integers(-(2**53), 2**53)),
    "number": (float, st.floats(allow_nan=False, allow_infinity=False)),
    "string": (str, TEXT),
    "flag": (bool, st.booleans()),
    "choice": (Literal["a", "b"], st.sampled_from(["a", "b"])),
    "enum": (Color, st.sampled_from(["red", "blue"])),
    "optional": (Optional[str], st.none() | TEXT),  # noqa: UP045
    "union": (int | str, st.integers(-(2**53), 2**53) | TEXT),
    "list": (list[int], st.lists(st.integers(-(2**53), 2**53))),
    "mapping": (dict[str, bool], st.dictionaries(TEXT, st.booleans())),
    "pair": (tuple[int, str], st.tuples(st.integers(0, 9), TEXT).map(list)),
    "typed_dict": (Options, st.fixed_dictionaries({}, optional={"depth": st.integers(0, 9)})),
    "dataclass": (Point, st.fixed_dictionaries({"x": st.integers(0, 9)})),
    "recursive": (Node, st.just({"value": 1, "next": {"value": 2, "next": None}})),
    "bounded": (Annotated[int, msgspec.Meta(ge=0, le=5)], st.integers(0, 5)),
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a", "red", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xy"), inner),
    max_leaves=4,
)


def function_of(annotations: dict[str, Any], defaults: dict[str, Any]):
    """A function with these parameters that returns what it was called with."""

    def called(**values: Any) -> dict[str, Any]:
        return values

    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name, inspect.Parameter.empty),
        )
        for name in annotations
    )
    called.__annotations__ = annotations
    return called


def allowed(schema: dict[str, Any], arguments: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(arguments)


@settings(deadline=None)
@given(st.data())
def test_arguments_that_satisfy_the_schema_can_be_called(data):
    names = data.draw(st.lists(st.sampled_from(sorted(ANNOTATIONS)), unique=True, max_size=6))
    optional = data.draw(st.sets(st.sampled_from(names))) if names else set()
    function = function_of({name: ANNOTATIONS[name][0] for name in names}, dict.fromkeys(optional))
    signature = Signature(function)
    given_names = [n for n in names if n not in optional or data.draw(st.booleans())]
    arguments = {name: data.draw(ANNOTATIONS[name][1]) for name in given_names}
    assert allowed(signature.schema, arguments)
    assert set(function(**signature.bind(arguments))) == set(given_names)


@settings(deadline=None)
@given(st.sampled_from(sorted(ANNOTATIONS)), JSON)
def test_a_value_is_bound_exactly_when_the_schema_allows_it(name, value):
    signature = Signature(function_of({name: ANNOTATIONS[name][0]}, {}))
    try:
        signature.bind({name: value})
        bound = True
    except ArgumentError:
        bound = False
    assert bound == allowed(signature.schema, {name: value})


def test_values_arrive_as_the_annotated_python_types():
    def draw(color: Color, at: Point, size: tuple[int, str], path: Node) -> None: ...

    bound = Signature(draw).bind(
        {"color": "blue", "at": {"x": 1}, "size": [2, "px"], "path": {"value": 3}}
    )
    assert bound == {
        "color": Color.BLUE,
        "at": Point(1),
        "size": (2, "px"),
        "path": Node(value=3),
    }


def test_descriptions_come_from_the_docstring_and_defaults_from_the_signature():
    def grep(pattern: str, path: str = ".", color: Color = Color.RED) -> str:
        """Find lines.

        Looks into hidden files too.

        Args:
            pattern: what to
                look for
            path: where
        """
        return pattern + path

    signature = Signature(grep)
    assert signature.description == "Find lines.\n\nLooks into hidden files too."
    properties = signature.schema["properties"]
    assert properties["pattern"] == {"type": "string", "description": "what to look for"}
    assert properties["path"] == {"type": "string", "description": "where", "default": "."}
    assert properties["color"]["default"] == "red"
    assert signature.schema["required"] == ["pattern"]
    assert signature.schema["additionalProperties"] is False


def test_defaults_are_left_to_the_function():
    def f(items: list[int] = [1]) -> None: ...  # noqa: B006

    assert Signature(f).bind({}) == {}


def test_a_method_is_described_without_self():
    class Shop:
        def buy(self, item: str) -> None: ...

    assert list(Signature(Shop().buy).schema["properties"]) == ["item"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda *rest: rest, r"\*rest"),
        (lambda **rest: rest, r"\*\*rest"),
        (lambda x, /: x, "positional-only x"),
        (lambda x: x, "parameter x needs a type annotation"),
    ],
)
def test_signatures_that_json_cannot_fill_are_refused_by_name(function, message):
    with pytest.raises(TypeError, match=message):
        Signature(function)


def test_a_type_that_has_no_json_form_is_refused_by_name():
    class Custom: ...

    def f(x: Custom) -> None: ...

    f.__annotations__["x"] = Custom
    with pytest.raises(TypeError, match=r"tool f: .*Custom.* is not supported"):
        Signature(f)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing required field `count`"),
        ({"count": "3"}, "argument count: Expected `int`, got `str`"),
        ({"count": 1, "points": [{"x": 1}, {"x": "?"}]}, r"argument points\[1\]\.x"),
        ({"count": 1, "other": 2}, "unknown field `other`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_an_argument_error_names_the_argument(arguments, message):
    def f(count: int, points: list[Point] = []) -> None: ...  # noqa: B006

    with pytest.raises(ArgumentError, match=message):
        Signature(f).bind(arguments)
