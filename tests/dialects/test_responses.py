import json
import time

import pytest
from scripted import WEATHER, called, named_events, said, scripted

from agentserve.config import ServerSettings
from agentserve.dialects.responses.store import ResponseStore, Stored

pytestmark = pytest.mark.model
PATH = "/v1/responses"
TOOLS = [{"type": "function", **WEATHER, "strict": False}]


ENDINGS = ("text.delta", "text.done", "part.done")


def body(given, **more):
    return {"model": "any", "input": given, **more}


def outputs(response, text="sunny"):
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": text}
        for item in response["output"]
        if item["type"] == "function_call"
    ]


def reused(first, second):
    """Whether `second` computed nothing of what `first` had."""
    before = first["usage"]["total_tokens"]
    return second["usage"]["input_tokens_details"]["cached_tokens"] >= before - 1


@pytest.fixture(scope="module")
def server():
    with scripted(said("Yes.", repeat=True)) as running:
        yield running


def test_a_response_has_every_field(server):
    answer = server.post(PATH, body("Hi", instructions="Be brief.", metadata={"a": "b"}))
    whole = answer.json()
    assert whole["id"].startswith("resp_")
    assert (whole["object"], whole["status"], whole["model"]) == ("response", "completed", "any")
    (item,) = whole["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    ]
    assert whole["usage"]["total_tokens"] > 0
    assert (whole["instructions"], whole["metadata"]) == ("Be brief.", {"a": "b"})
    assert answer.headers["X-AgentServe-Session"]


def test_the_events_of_a_stream_come_in_order_and_numbered():
    answers = [called("Oslo", text="I look.", thought="Where?")]
    with scripted(*answers, family="qwen3") as server:
        text = server.post(PATH, body("weather?", tools=TOOLS, stream=True)).text
    assert text.endswith("data: [DONE]\n\n")
    events = named_events(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys((e["type"], e.get("output_index")) for e in events))
    text_part = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == [
        ("response.created", None),
        ("response.in_progress", None),
        *((f"response.{kind}".format("reasoning_text"), 0) for kind in text_part),
        *((f"response.{kind}".format("output_text"), 1) for kind in text_part),
        *((f"response.{kind}", 2) for kind in call),
        ("response.completed", None),
    ]
    done = events[-1]["response"]
    closed = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done["output"] == closed
    opened = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [item["id"] for item in opened] == [item["id"] for item in closed]
    assert {item["status"] for item in opened} == {"in_progress"}


def test_log_probabilities_are_in_the_text_s_parts_and_its_deltas():
    include = ["message.output_text.logprobs"]
    with scripted(said("One two.", repeat=True)) as server:
        for asked, most in (({"include": include}, 0), ({"top_logprobs": 3}, 3)):
            whole = server.post(PATH, body("Hi", **asked)).json()
            assert whole["top_logprobs"] == most
            told = whole["output"][0]["content"][0]["logprobs"]
            assert "".join(one["token"] for one in told) == "One two."
            assert {len(one["top_logprobs"]) for one in told} == {most}
            events = named_events(server.post(PATH, body("Hi", **asked, stream=True)).text)
            kinds = {kind: [e for e in events if e["type"].endswith(kind)] for kind in ENDINGS}
            assert [one for e in kinds["text.delta"] for one in e["logprobs"]] == told
            assert kinds["text.done"][0]["logprobs"] == told
            assert kinds["part.done"][0]["part"]["logprobs"] == told


def test_a_loop_by_previous_response_sends_only_what_is_new():
    answers = [called("Oslo", "Rome"), said("Nice.", when="sunny"), said("Bye.", when="thanks")]
    with scripted(*answers) as server:
        first = server.post(PATH, body("weather?", tools=TOOLS)).json()
        more = {"tools": TOOLS, "previous_response_id": first["id"]}
        second = server.post(PATH, body(list(reversed(outputs(first))), **more)).json()
        assert second["output"][0]["content"][0]["text"] == "Nice."
        assert reused(first, second)
        more["previous_response_id"] = second["id"]
        third = server.post(PATH, body("thanks", **more)).json()
        assert third["previous_response_id"] == second["id"]
        assert reused(second, third)
        assert server.resolved() == {"new": 1, "previous_response": 2}
        assert server.metric("dialect_sessions") == 1


def test_a_loop_that_resends_everything_reuses_everything():
    answers = [called("Oslo", thought="Where?"), said("Nice.", when="sunny")]
    with scripted(*answers, family="qwen3") as server:
        asked = [{"role": "user", "content": "weather?"}]
        first = server.post(PATH, body(asked, tools=TOOLS, store=False)).json()
        again = [*asked, *first["output"], *outputs(first)]
        second = server.post(PATH, body(again, tools=TOOLS, store=False)).json()
        assert reused(first, second)
        assert server.metric("stored_responses") == 0
        assert server.http.get(f"{PATH}/{first['id']}").status_code == 404


def test_a_response_can_be_gone_on_from_twice():
    answers = [said("A.", when="start"), said("B.", when="left"), said("C.", when="right")]
    with scripted(*answers) as server:
        first = server.post(PATH, body("start")).json()
        for word in ("left", "right"):
            more = server.post(PATH, body(word, previous_response_id=first["id"])).json()
            assert reused(first, more)


def test_other_instructions_keep_the_history_and_say_what_it_costs(server):
    first = server.post(PATH, body("Hi", instructions="Be brief.")).json()
    more = {"previous_response_id": first["id"], "instructions": "Be long."}
    second = server.post(PATH, body("Go", **more))
    assert second.status_code == 200
    assert second.json()["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    own = {"previous_response_id": second.json()["id"], "instructions": "Be long."}
    third = server.post(PATH, body("Go on", **own)).json()
    assert reused(second.json(), third)


def test_stored_responses_are_read_listed_and_deleted(server):
    made = server.post(PATH, body("Hi")).json()
    one = f"{PATH}/{made['id']}"
    assert server.http.get(one).json() == made
    items = server.http.get(f"{one}/input_items").json()["data"]
    assert items[0]["content"] == "Hi"
    assert server.post(f"{one}/cancel", {}).json()["status"] == "completed"
    assert server.http.delete(one).json()["deleted"] is True
    assert server.http.get(one).status_code == 404
    after = server.post(PATH, body("Go", previous_response_id=made["id"]))
    assert after.status_code == 400
    assert after.json()["error"]["code"] == "previous_response_not_found"


def test_a_response_runs_in_the_background(server):
    begun = server.post(PATH, body("Hi", background=True)).json()
    assert begun["status"] == "in_progress"
    for _ in range(500):
        now = server.http.get(f"{PATH}/{begun['id']}").json()
        if now["status"] != "in_progress":
            break
        time.sleep(0.01)
    assert now["status"] == "completed"
    assert now["output"][0]["content"][0]["text"] == "Yes."
    assert server.post(PATH, body("Go", previous_response_id=begun["id"])).status_code == 200


def ended(server, name):
    """Return a stored response once it has ended."""
    for _ in range(500):
        now = server.http.get(f"{PATH}/{name}").json()
        if now["status"] != "in_progress":
            break
        time.sleep(0.01)
    return now


def left_at_once(server, **more):
    """Leave a stream after its first event; return the response's id."""
    given = body("Hi", stream=True, **more)
    with server.http.stream("POST", PATH, json=given) as stream:
        data = next(line for line in stream.iter_lines() if line.startswith("data: "))
    return json.loads(data.removeprefix("data: "))["response"]["id"]


@pytest.mark.parametrize("more", [{}, {"background": True}, {"top_logprobs": 20}])
def test_a_stream_that_nobody_reads_to_its_end_is_kept_and_can_be_gone_on_from(more):
    with scripted(said("word " * 300, when="Hi"), said("Yes.", repeat=True)) as server:
        name = left_at_once(server, **more)
        now = ended(server, name)
        assert now["status"] == "completed"
        content = now["output"][0]["content"][0]
        assert content["text"] == "word " * 300
        # Where the engine is faster than all who read, the buffer has lost them.
        assert len(content["logprobs"]) in ((0, 301) if "top_logprobs" in more else (0,))
        after = server.post(PATH, body("Go", previous_response_id=name))
        assert reused(now, after.json())


@pytest.mark.parametrize("background", [False, True])
def test_a_stream_that_was_cancelled_stays_cancelled(background):
    hold = [said("word " * 900, when="Hi"), said("Yes.", repeat=True)]
    with scripted(*hold) as server:
        given = body("Hi", stream=True, background=background)
        with server.http.stream("POST", PATH, json=given) as stream:
            lines = stream.iter_lines()
            data = next(line for line in lines if line.startswith("data: "))
            name = json.loads(data.removeprefix("data: "))["response"]["id"]
            told = server.http.post(f"{PATH}/{name}/cancel").json()["status"]
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
        assert ended(server, name)["status"] == told


def test_a_response_that_is_deleted_while_it_runs_generates_no_further():
    with scripted(said("word " * 900, when="Hi"), said("Yes.", repeat=True)) as server:
        begun = server.post(PATH, body("Hi", background=True))
        server.http.delete(f"{PATH}/{begun.json()['id']}")
        session = begun.headers["X-AgentServe-Session"]
        for _ in range(500):
            state = server.http.get(f"/sessions/{session}").json()["state"]
            if state == "idle":
                break
            time.sleep(0.01)
        turns = server.http.get(f"/sessions/{session}/turns").json()
        assert state == "idle"
        assert "completed" not in {turn["status"] for turn in turns["turns"]}


def test_an_item_without_a_type_is_a_message(server):
    asked = [{"type": None, "role": "user", "content": "Hi"}]
    assert server.post(PATH, body(asked)).json()["status"] == "completed"


def test_a_response_that_was_cut_is_incomplete(server):
    cut = server.post(PATH, body("Hi", max_output_tokens=1)).json()
    assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_principal_sees_only_its_own_responses():
    settings = ServerSettings(api_keys=("a", "b"))
    with scripted(said("x", repeat=True), settings=settings, key="a") as server:
        made = server.post(PATH, body("Hi")).json()
        other = server.http.get(f"{PATH}/{made['id']}", headers={"x-api-key": "b"})
        assert other.status_code == 404
        after = server.post(PATH, body("Go", previous_response_id=made["id"]), x_api_key="b")
        assert after.status_code == 400


@pytest.mark.parametrize(
    "change",
    [
        {"conversation": "conv_1"},
        {"top_logprobs": 21},
        {"text": "x"},
        {"input": None},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
        {"previous_response_id": "resp_nobody"},
        {"background": True, "store": False},
        {"text": {"format": {"type": "xml"}}},
        {"text": {"format": "json"}},
    ],
)
def test_what_cannot_be_done_is_a_400(server, change):
    answer = server.post(PATH, body("hi") | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_nothing_compacts_here_and_clients_are_told_by_a_404(server):
    assert server.post(f"{PATH}/compact", {}).status_code == 404


def test_the_store_is_bounded_by_bytes():
    store = ResponseStore(4000)
    for number in range(20):
        store.put("me", Stored({"id": f"r{number}", "text": "x" * 100}, [], "s", "t_1"))
    assert store.bytes <= 4000
    assert 1 <= len(store) < 20
    assert store.get("me", "r19") is not None
    assert store.get("me", "r0") is None
    assert store.get("you", "r19") is None


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_items_of_the_input_are_inherited_and_instructions_are_not(role):
    lead = {"type": "message", "role": role, "content": "Speak of ships."}
    with scripted(
        said("Ahoy.", system="Speak of ships.", when="Hi"),
        said("Aye.", system="Speak of ships.", when="Again"),
        said("Aye aye.", system="Speak of ships.", when="More"),
    ) as server:
        first = server.post(PATH, body([lead, {"role": "user", "content": "Hi"}])).json()
        second = server.post(PATH, body("Again", previous_response_id=first["id"])).json()
        third = server.post(PATH, body("More", previous_response_id=second["id"])).json()
        assert server.resolved() == {"new": 1, "previous_response": 2}
    assert reused(first, second)
    assert reused(second, third)
    with scripted(
        said("Ahoy.", system="Speak of ships.", when="Hi"),
        said("Aye.", system="Speak of ships.", when="Again"),
        said("What?", when="Again"),
    ) as server:
        first = server.post(PATH, body("Hi", instructions="Speak of ships.")).json()
        second = server.post(PATH, body("Again", previous_response_id=first["id"])).json()
    assert second["output"][0]["content"][0]["text"] == "What?"


def test_one_principal_s_responses_do_not_push_out_those_of_another():
    store = ResponseStore(8000)
    store.put("you", Stored({"id": "mine"}, [], "s", "t_1"))
    for number in range(40):
        store.put("me", Stored({"id": f"r{number}", "text": "x" * 100}, [], "s", "t_1"))
    assert store.bytes <= 8000
    assert store.get("you", "mine") is not None
    for number in range(40):
        store.drop("me", f"r{number}")
    assert store.drop("you", "mine")
    assert (store.bytes, len(store)) == (0, 0)
