"""The two checks of Open Responses that llm-comply lacks, in llm-comply's schema of a response."""

import json
from pathlib import Path

import llm_comply
import pytest
from llm_comply.schema import SpecLoader
from scripted import WEATHER, called, said, scripted

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")

SPECIFICATION = Path(llm_comply.__file__).parent / "specs" / "openresponses.json"
TOOL = {"type": "function", **WEATHER}
QUESTION = {"type": "message", "role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture
def server():
    """Yield a server that asks for the weather and then tells it."""
    with scripted(
        called("Oslo", when="weather in Oslo"),
        said("Snow, 4 degrees.", when="4 degrees"),
        said("You asked about Oslo.", when="Which city"),
    ) as running:
        yield running


def answer(server, **fields):
    """Ask for a response; return it once the specification accepts it."""
    got = server.post("/v1/responses", {"model": "any", "tools": [TOOL], **fields})
    assert got.status_code == 200, got.text
    response = got.json()
    assert SpecLoader(str(SPECIFICATION)).validate(response, "ResponseResource") == []
    assert response["status"] == "completed"
    return response


def result(call):
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "4 degrees, snow"}


def only_call(response):
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Oslo"})
    return call


def text(response):
    (message,) = [item for item in response["output"] if item["type"] == "message"]
    return message["content"][0]["text"]


def test_a_function_call_makes_the_round_trip_in_the_input(server):
    call = only_call(answer(server, input=[QUESTION]))
    told = answer(server, input=[QUESTION, call, result(call)])
    assert text(told) == "Snow, 4 degrees."


def test_a_response_goes_on_from_the_one_that_it_names(server):
    first = answer(server, input=[QUESTION])
    assert first["previous_response_id"] is None
    second = answer(server, input=[result(only_call(first))], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert text(second) == "Snow, 4 degrees."
    third = answer(server, input="Which city?", previous_response_id=second["id"])
    assert text(third) == "You asked about Oslo."
    cached = third["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= second["usage"]["input_tokens"] + second["usage"]["output_tokens"] - 1


def test_a_response_that_is_not_there_cannot_be_gone_on_from(server):
    got = server.post(
        "/v1/responses", {"model": "any", "input": "x", "previous_response_id": "resp_none"}
    )
    assert got.status_code in (400, 404)
    assert got.json()["error"]["code"] == "previous_response_not_found"
