"""Constrained turns on SmolLM2, through the session API."""

import json

import jsonschema
import pytest

from agentserve import Client, wire
from agentserve.errors import BadToolSchema, InvalidRequest

pytestmark = pytest.mark.model

WEATHER = wire.Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
    "Tell the weather in a city.",
    examples=[{"input": "How is the weather in Rome?", "arguments": {"city": "Rome"}}],
)
NOW = wire.Tool("now", {"type": "object", "properties": {}}, "Tell the time.")
TOOLS = {tool.name: tool for tool in (WEATHER, NOW)}
QUESTION = "How is the weather in Oslo?"


@pytest.fixture(scope="module")
def client():
    with Client.embedded(kv_bytes=1 << 28, host_bytes=0) as client:
        yield client


def ask(client, question=QUESTION, tools=(WEATHER, NOW), **options):
    options.setdefault("max_output_tokens", 40)
    return client.session(tools=tools).step(question, **options)


def assert_valid(turn):
    for call in turn.tool_calls:
        assert call.schema_errors == []
        jsonschema.validate(call.arguments, TOOLS[call.name].parameters)


def test_by_default_calls_are_constrained_and_text_is_free(client):
    turn = ask(client)
    assert [call.name for call in turn.tool_calls] == ["get_weather"]
    assert_valid(turn)
    assert ask(client, tools=(), question="Say hello.").text


def test_tool_choice_decides_whether_and_what_is_called(client):
    required = ask(client, "Hello!", tool_choice="required")
    assert required.tool_calls
    assert_valid(required)
    named = ask(client, tool_choice={"name": "now"}, parallel_tool_calls=False)
    assert [(call.name, call.arguments) for call in named.tool_calls] == [("now", {})]
    assert ask(client, tool_choice="none").tool_calls == []


def test_only_allowed_tools_are_called(client):
    turn = ask(client, tools_allowed=["now"], tool_choice="required", parallel_tool_calls=False)
    assert [call.name for call in turn.tool_calls] == ["now"]


def test_an_answer_is_json_of_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "degrees": {"type": "integer"}},
        "required": ["city", "degrees"],
    }
    answer = {"type": "json_schema", "schema": schema}
    turn = ask(client, tools=(), response_format=answer)
    jsonschema.validate(json.loads(turn.text), schema)


@pytest.mark.parametrize("tools", [(), (WEATHER, NOW)])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_an_answer_that_was_cut_goes_on_where_its_grammar_was(client, tools, cut):
    schema = {
        "type": "object",
        "properties": {"degrees": {"type": "integer"}, "sky": {"enum": ["grey", "blue"]}},
        "required": ["degrees", "sky"],
    }
    answer = {"type": "json_schema", "schema": schema}
    session = client.session(tools=tools)
    options = {"response_format": answer, "tool_choice": "none"}
    parts = [session.step(QUESTION, max_output_tokens=cut, **options)]
    while parts[-1].stop_reason == "max_tokens" and len(parts) < 4:
        parts.append(session.step([], max_output_tokens=cut if len(parts) < 3 else 40, **options))
    assert len(parts) == 4
    jsonschema.validate(json.loads("".join(part.text for part in parts)), schema)


def test_what_is_asked_of_the_rest_of_a_message_holds_for_that(client):
    session = client.session(tools=[WEATHER, NOW])
    assert session.step(QUESTION, max_output_tokens=3, tool_choice="none").text
    turn = session.step([], max_output_tokens=40, tool_choice={"name": "now"})
    assert [call.name for call in turn.tool_calls][:1] == ["now"], turn
    session = client.session()
    assert session.step(QUESTION, max_output_tokens=3).text
    answer = {"type": "json_schema", "schema": {"enum": [1, 2]}}
    assert session.step([], max_output_tokens=5, response_format=answer).text in ("1", "2")


DEAD = {"anyOf": [{"$ref": "#/properties/x"}]}
ENDLESS = {"type": "object", "properties": {"x": DEAD}, "required": ["x"]}


@pytest.mark.parametrize("schema", [ENDLESS, {"type": "string", "pattern": r"^[^\s\S]$"}])
def test_a_schema_without_a_value_is_the_client_s_fault(client, schema):
    answer = {"type": "json_schema", "schema": schema}
    with pytest.raises(InvalidRequest):
        client.session().step(QUESTION, response_format=answer, max_output_tokens=9)
    tool = wire.Tool("dead", {**ENDLESS, "properties": {"x": DEAD}})
    with pytest.raises(BadToolSchema):
        client.session(tools=[tool]).step(
            QUESTION, tool_choice="required", max_output_tokens=20, parallel_tool_calls=False
        )


def test_beside_tools_an_answer_of_a_schema_is_that_or_calls(client):
    schema = {
        "type": "object",
        "properties": {"degrees": {"type": "integer"}},
        "required": ["degrees"],
        "additionalProperties": False,
    }
    answer = {"type": "json_schema", "schema": schema}
    turn = ask(client, response_format=answer)
    assert bool(turn.tool_calls) != bool(turn.text)
    assert_valid(turn)
    if turn.text:
        jsonschema.validate(json.loads(turn.text), schema)


def test_what_is_not_enforced_is_told_once(client):
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "not": {"const": ""}}},
    }
    lax = wire.Tool("get_weather", parameters)
    session = client.session(tools=[lax])
    first = session.step(QUESTION, max_output_tokens=1, tool_choice="none")
    (warning,) = [text for text in first.warnings if "checked only once" in text]
    assert warning.startswith("tools.get_weather.parameters")
    assert "properties.city.not" in warning
    assert session.step("And in Rome?", max_output_tokens=1, tool_choice="none").warnings == []
    with pytest.raises(BadToolSchema, match="strict"):
        client.session(tools=[wire.Tool("get_weather", parameters, strict=True)])


def test_a_schema_that_takes_too_long_fails_its_turn_and_no_other(client):
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(abc|.){5000}x"}}}
    session = client.session(tools=[wire.Tool("slow", slow)])
    with pytest.raises(BadToolSchema, match=r"too much time|longer than"):
        session.step("go", tool_choice="required")
    assert session.step("go", tool_choice="none", max_output_tokens=2).status == "incomplete"
    assert_valid(ask(client))


def test_a_call_that_does_not_end_is_cut_at_the_limit_and_says_so(client):
    endless = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(ha){99,}$"}}}
    tool = wire.Tool("laugh", endless | {"required": ["a"]})
    turn = ask(client, tools=[tool], tool_choice="required", max_output_tokens=24)
    assert (turn.status, turn.stop_reason) == ("incomplete", "max_tokens")
    (cut,) = turn.output
    assert isinstance(cut, wire.MalformedToolCallOut)
    assert cut.error == "truncated"
