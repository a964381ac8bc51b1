"""The accumulators of OpenAI's and Anthropic's own libraries take every stream."""

import pytest
from scripted import WEATHER, called, said, scripted

pytestmark = pytest.mark.model
PARAMETERS = WEATHER["parameters"]
ANSWERS = [
    called("Oslo", "Rome", text="I look.", thought="Where?", when="weather"),
    said("Nice.", when="sunny"),
    {"raw": '<tool_call>\n{"name": "get_weather", "arguments": {"ci', "when": "cut"},
]


@pytest.fixture
def server():
    with scripted(*ANSWERS, family="qwen3") as running:
        yield running


@pytest.fixture
def openai(server):
    library = pytest.importorskip("openai")
    with library.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(server):
    library = pytest.importorskip("anthropic")
    with library.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client


def test_chat_completions(openai):
    tools = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    tools[0]["function"]["parameters"] = PARAMETERS | {"additionalProperties": False}
    messages = [{"role": "user", "content": "weather?"}]
    more = {"model": "m", "tools": tools, "stream_options": {"include_usage": True}}
    with openai.chat.completions.stream(messages=messages, **more) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    message = first.choices[0].message
    assert message.content == "I look."
    assert [call.function.parsed_arguments for call in message.tool_calls] == [
        {"city": "Oslo"},
        {"city": "Rome"},
    ]
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    with openai.chat.completions.stream(messages=messages, **more) as stream:
        second = stream.get_final_completion()
    assert second.choices[0].message.content == "Nice."
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1


def test_responses(openai):
    tools = [{"type": "function", **WEATHER, "strict": False}]
    with openai.responses.stream(model="m", input="weather?", tools=tools) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in first.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    more = {"model": "m", "tools": tools, "previous_response_id": first.id}
    with openai.responses.stream(input=outputs, **more) as stream:
        second = stream.get_final_response()
    assert second.output_text == "Nice."
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1


def test_responses_that_resend_their_items(openai):
    tools = [{"type": "function", **WEATHER, "strict": False}]
    asked = [{"role": "user", "content": "weather?"}]
    first = openai.responses.create(model="m", input=asked, tools=tools, store=False)
    asked += [item.model_dump(exclude_none=True) for item in first.output]
    asked += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = openai.responses.create(model="m", input=asked, tools=tools, store=False)
    assert second.output_text == "Nice."
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1


def test_messages(anthropic):
    tools = [{"name": "get_weather", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": "weather?"}]
    more = {"model": "m", "max_tokens": 200, "tools": tools}
    with anthropic.messages.stream(messages=messages, **more) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_message()
    assert {"thinking", "text", "input_json", "message_stop"} <= kinds
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in first.content[2:]] == [{"city": "Oslo"}, {"city": "Rome"}]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        for block in first.content[2:]
    ]
    messages += [{"role": "assistant", "content": first.content}]
    messages += [{"role": "user", "content": results}]
    with anthropic.messages.stream(messages=messages, **more) as stream:
        second = stream.get_final_message()
    assert second.content[0].text == "Nice."
    used = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= used + first.usage.output_tokens - 1
    counted = anthropic.messages.count_tokens(model="m", messages=messages, tools=tools)
    assert counted.input_tokens > used


def test_calls_that_were_cut_do_not_break_the_accumulators(server, openai, anthropic):
    tools = [{"type": "function", "function": WEATHER}]
    messages = [{"role": "user", "content": "cut"}]
    with openai.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
        assert stream.get_final_completion().choices[0].finish_reason in ("stop", "tool_calls")


def test_errors_are_the_libraries_own(openai, anthropic):
    import anthropic as anthropic_library
    import openai as openai_library

    with pytest.raises(openai_library.BadRequestError, match="n is 1"):
        openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], n=2)
    with pytest.raises(openai_library.NotFoundError):
        openai.responses.retrieve("resp_nobody")
    with pytest.raises(anthropic_library.BadRequestError, match="tool_choice"):
        anthropic.messages.create(
            model="m",
            max_tokens=9,
            messages=[{"role": "user", "content": "x"}],
            tool_choice={"type": "any"},
        )
    assert [model.id for model in openai.models.list()] == ["smollm2-135m"]
    assert [model.id for model in anthropic.models.list()] == ["smollm2-135m"]
