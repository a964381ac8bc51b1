import jsonschema
import pytest

from agentserve import wire
from agentserve.sessions.examples import worked_example

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def of(properties, **fields):
    schema = {"type": "object", "properties": properties}
    return worked_example(wire.Tool("f", schema | fields, "Do it.\nAt length."))


def test_the_client_s_example_is_taken_as_it_is():
    tool = wire.Tool(
        "f", CITY, examples=[{"input": "Rain in Rome?", "arguments": {"city": "Rome"}}, {}]
    )
    assert worked_example(tool) == ("Rain in Rome?", {"city": "Rome"})


@pytest.mark.parametrize("example", [{"city": "Rome"}, {"arguments": {"city": "Rome"}}])
def test_an_example_without_input_is_said_with_the_description_and_the_values(example):
    tool = wire.Tool("weather", CITY, "Tell the weather.\nNot the climate.", examples=[example])
    assert worked_example(tool) == ("Tell the weather: Rome", {"city": "Rome"})
    bare = wire.Tool("weather", CITY, examples=[example])
    assert worked_example(bare)[0] == "Use weather: Rome"


def test_a_tool_without_arguments_is_asked_for_by_its_description():
    assert of({}) == ("Do it.", {})


def test_made_up_values_fit_the_schema_and_stand_in_what_is_said():
    properties = {
        "path": {"type": "string"},
        "to": {"type": "string"},
        "line": {"type": "integer"},
        "from": {"type": "integer", "minimum": 10},
        "deep": {"type": "boolean"},
        "kind": {"enum": ["german", "french"]},
        "limit": {"type": "integer", "default": 20},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {
            "type": "object",
            "properties": {"x": {"type": ["number", "null"]}},
            "required": ["x"],
        },
    }
    said, arguments = of(properties, required=list(properties))
    jsonschema.validate(arguments, {"type": "object", "properties": properties})
    assert list(arguments) == list(properties)
    assert (arguments["kind"], arguments["limit"], arguments["from"]) == ("german", 20, 10)
    assert len({arguments["path"], arguments["to"], *arguments["tags"]}) == 3
    for name in ("path", "to"):
        assert arguments[name] != name
        assert arguments[name] in said


def test_the_value_that_a_description_names_is_used():
    said = {"type": "string", "description": "file names to list, such as *.py."}
    assert of({"pattern": said}) == ("Do it: *.py", {"pattern": "*.py"})
    said["description"] = 'The city, e.g. "Oslo" (in English)'
    assert of({"pattern": said})[1] == {"pattern": "Oslo"}


def test_optional_arguments_are_left_out_and_one_is_shown_where_none_is_required():
    two = {"a": {"type": "string"}, "b": {"type": "string"}}
    assert list(of(two, required=["b"])[1]) == ["b"]
    assert list(of(two)[1]) == ["a"]


def test_a_schema_that_is_nested_in_itself_ends():
    inner = {"type": "array", "items": {"type": "object", "properties": {}}}
    for _ in range(20):
        inner = {"type": "object", "properties": {"in": inner}, "required": ["in"]}
    assert of({"x": inner})[1] == {"x": {"in": {"in": {}}}}
