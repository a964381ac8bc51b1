"""The accumulator of the `anthropic` package on every shape of stream, and unstreamed answers."""

import anthropic
import pytest
from scripted import WEATHER, scripted
from stream_shapes import CUT, SHAPES, WHOLE, Seen, expected

TOOL = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["parameters"],
}
ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "calls"}


@pytest.fixture(scope="module")
def client():
    """Yield an Anthropic client of a server that gives each shape on request; it never retries."""
    with (
        scripted(*(shape.answer for shape in SHAPES), family="qwen3") as running,
        anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0) as client,
    ):
        yield client


def request(shape):
    return {
        "model": "any",
        "max_tokens": shape.limit,
        "messages": [{"role": "user", "content": shape.question}],
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
        **({"stop_sequences": [shape.stop]} if shape.stop else {}),
    }


def seen(message):
    kinds = {kind: [block for block in message.content if block.type == kind] for kind in KINDS}
    assert sum(map(len, kinds.values())) == len(message.content)
    assert len({call.id for call in kinds["tool_use"]}) == len(kinds["tool_use"])
    usage = message.usage
    read = usage.cache_read_input_tokens
    return Seen(
        "".join(block.text for block in kinds["text"]),
        "".join(block.thinking for block in kinds["thinking"]),
        [(call.name, call.input) for call in kinds["tool_use"]],
        ENDS[message.stop_reason],
        usage.input_tokens + read + (usage.cache_creation_input_tokens or 0),
        read,
        usage.output_tokens,
    )


KINDS = ("text", "thinking", "tool_use")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_streamed_message_is_the_whole_one(client, shape):
    asked = request(shape)
    whole = seen(client.messages.create(**asked))
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = seen(stream.get_final_message())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    if shape.name != "cut call":  # what there is of its arguments depends on who reads them
        streamed.cached = whole.cached
        assert streamed == whole
    if shape in CUT:
        assert streamed.end == shape.end
        return
    assert streamed.prompt > 0
    assert streamed.output > 0
    streamed.prompt = streamed.cached = streamed.output = 0
    assert streamed == expected(shape)


def test_a_stop_sequence_is_named(client):
    (shape,) = [shape for shape in SHAPES if shape.stop]
    message = client.messages.create(**request(shape))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", shape.stop)


def test_tokens_are_counted_as_the_prompt_of_the_same_request(client):
    asked = request(WHOLE[0])
    message = client.messages.create(**asked)
    del asked["max_tokens"]
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == seen(message).prompt


def test_errors_are_of_the_classes_that_callers_catch(client):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model="any", max_tokens=9, messages=[{"role": "user", "content": "?"}]
        )
    assert refused.value.body["error"]["type"] == "invalid_request_error"
