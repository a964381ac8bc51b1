"""The accumulators of the `openai` package on every shape of stream, and unstreamed answers."""

import json

import openai
import pytest
from scripted import WEATHER, scripted
from stream_shapes import CUT, SHAPES, WHOLE, Seen, expected

ENDS = {"stop": "stop", "length": "length", "tool_calls": "calls"}
CHAT_TOOL = {"type": "function", "function": WEATHER}
TOOL = {"type": "function", "strict": False, **WEATHER}
by_name = {"argvalues": SHAPES, "ids": [shape.name for shape in SHAPES]}


@pytest.fixture(scope="module")
def server():
    """Yield the address of a server that gives each shape on request."""
    with scripted(*(shape.answer for shape in SHAPES), family="qwen3") as running:
        yield running.url


@pytest.fixture(scope="module")
def client(server):
    """Yield an OpenAI client that never retries."""
    with openai.OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0) as client:
        yield client


def chat_request(shape):
    return {
        "model": "any",
        "messages": [{"role": "user", "content": shape.question}],
        "tools": [CHAT_TOOL],
        "max_completion_tokens": shape.limit,
        **({"stop": [shape.stop]} if shape.stop else {}),
    }


def seen_in_chat(completion):
    (choice,) = completion.choices
    message, usage = choice.message, completion.usage
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return Seen(
        message.content or "",
        getattr(message, "reasoning_content", None) or "",
        [(call.function.name, _arguments(call.function.arguments)) for call in calls],
        ENDS[choice.finish_reason],
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens,
        usage.completion_tokens,
    )


def _arguments(text):
    """Return a call's arguments; those of a call that was cut are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def require(shape, streamed, whole):
    """Check that both say the same, and what the script says where it was not cut."""
    assert streamed.cached >= 0
    streamed.cached = whole.cached  # the first of the two was the other's cache
    assert streamed == whole
    if shape in CUT:
        assert streamed.end == shape.end
        return
    assert streamed.prompt > 0
    assert streamed.output > 0
    streamed.prompt = streamed.cached = streamed.output = 0
    assert streamed == expected(shape)


@pytest.mark.parametrize("shape", **by_name)
def test_a_streamed_chat_completion_is_the_whole_one(client, shape):
    asked = chat_request(shape)
    whole = seen_in_chat(client.chat.completions.create(**asked))
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        events = [event.type for event in stream]
        snapshot = stream.current_completion_snapshot
    assert events.count("chunk") > 1
    require(shape, seen_in_chat(snapshot), whole)


def response_request(shape):
    return {
        "model": "any",
        "input": shape.question,
        "tools": [TOOL],
        "max_output_tokens": shape.limit,
    }


def seen_in_response(response):
    calls = [item for item in response.output if item.type == "function_call"]
    cut = response.incomplete_details
    end = {"max_output_tokens": "length"}[cut.reason] if cut else "calls" if calls else "stop"
    assert response.status == ("incomplete" if cut else "completed")
    assert len({item.id for item in response.output}) == len(response.output)
    return Seen(
        response.output_text,
        "".join(
            part.text
            for item in response.output
            if item.type == "reasoning"
            for part in item.content or []
        ),
        [(call.name, _arguments(call.arguments)) for call in calls],
        end,
        response.usage.input_tokens,
        response.usage.input_tokens_details.cached_tokens,
        response.usage.output_tokens,
    )


@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if not shape.stop], ids=lambda s: s.name
)
def test_a_streamed_response_is_the_whole_one(client, shape):
    asked = response_request(shape)
    whole = seen_in_response(client.responses.create(**asked))
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = events[-1].response
        if shape.end != "length":  # the package takes that for a broken stream
            assert stream.get_final_response().output == final.output
    assert [event.sequence_number for event in events] == list(range(len(events)))
    require(shape, seen_in_response(final), whole)


def test_structured_output_is_parsed(client):
    pydantic = pytest.importorskip("pydantic")  # the package brings it

    class City(pydantic.BaseModel):
        city: str
        days: int

    with scripted({"text": '{"city": "Oslo", "days": 3}', "repeat": True}) as server:
        own = client.with_options(base_url=f"{server.url}/v1")
        with own.chat.completions.stream(
            model="any", messages=[{"role": "user", "content": "?"}], response_format=City
        ) as stream:
            completion = stream.get_final_completion()
        response = own.responses.parse(model="any", input="?", text_format=City)
    assert completion.choices[0].message.parsed == City(city="Oslo", days=3)
    assert response.output_parsed == City(city="Oslo", days=3)


def test_models_are_listed_with_their_context(client):
    (model,) = client.models.list().data
    assert model.object == "model"
    assert model.max_model_len == 16_384
    assert client.models.retrieve("any-name").id == "any-name"


def test_errors_are_of_the_classes_that_callers_catch(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])
    assert refused.value.code == "invalid_request"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")


def test_the_accumulators_are_told_of_every_part(client):
    (shape,) = [shape for shape in WHOLE if shape.name == "all"]
    with client.responses.stream(**response_request(shape)) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 4
    assert kinds.count("response.output_item.done") == 4
    assert kinds.count("response.function_call_arguments.done") == 2
