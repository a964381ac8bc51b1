import json

import pytest
from scripted import WEATHER, called, chat_chunks, said, scripted

from agentserve.config import ServerSettings

pytestmark = pytest.mark.model
PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": WEATHER}]
FIVE = {"mode": "required", "tools": 5}


@pytest.fixture(scope="module")
def refusing():
    with scripted(said("x")) as server:
        yield server


def user(text):
    return {"role": "user", "content": text}


def body(messages, **more):
    return {"model": "any/name", "messages": messages, **more}


def tool_messages(message, output="sunny"):
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": output}
        for call in message["tool_calls"]
    ]


def test_an_answer_has_every_field_and_the_headers():
    with scripted(said("Hello.")) as server:
        answer = server.post(PATH, body([user("Hi")]))
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        (choice,) = whole["choices"]
        assert whole["id"].startswith("chatcmpl-")
        assert (whole["object"], whole["model"]) == ("chat.completion", "any/name")
        assert choice["message"]["content"] == "Hello."
        assert choice["message"]["refusal"] is None
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        usage = whole["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer.headers["X-AgentServe-Session"].startswith("s_")
        assert "decode;dur=" in answer.headers["Server-Timing"]


def test_a_tool_loop_computes_only_what_is_new_whatever_form_the_history_has():
    answers = [called("Oslo", "Rome", text="I look."), said("Nice.", when="sunny")]
    with scripted(*answers) as server:
        messages = [{"role": "system", "content": "Be brief."}, user("weather?")]
        first = server.post(PATH, body(messages, tools=TOOLS)).json()
        message = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        names = [call["function"]["name"] for call in message["tool_calls"]]
        assert names == ["get_weather", "get_weather"]
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(" , ", " : "))
        message |= {"function_call": None, "provider_specific_fields": {"x": 1}}
        message["content"] = [{"type": "text", "text": "I look. "}]
        later = [{**messages[1], "content": [{"type": "text", "text": "weather?"}]}, message]
        results = tool_messages(message)
        second = server.post(
            PATH, body([messages[0], *later, *reversed(results)], tools=TOOLS)
        ).json()
        assert second["choices"][0]["message"]["content"] == "Nice."
        before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 1
        assert server.resolved() == {"new": 1, "call_id": 1}
        assert server.metric("dialect_sessions") == 1


def test_a_stream_has_the_role_the_parts_the_reason_and_the_usage():
    answers = [called("Oslo", "Rome", text="I look.", thought="Where?")]
    with scripted(*answers, family="qwen3") as server:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = server.post(PATH, body([user("weather?")], tools=TOOLS, **options))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["X-AgentServe-Session"]
        assert "queue;dur=" in answer.headers["Server-Timing"]
        chunks = chat_chunks(answer.text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    *parts, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in parts)
    deltas = [chunk["choices"][0]["delta"] for chunk in parts]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Where?"
    assert "".join(d.get("content") or "" for d in deltas) == "I look."
    kinds = [next(iter(d), "end") for d in deltas[1:]]
    order = list(dict.fromkeys(kinds))
    assert order == ["reasoning_content", "content", "tool_calls", "end"]
    calls = [call for d in deltas for call in d.get("tool_calls", [])]
    for index, city in enumerate(("Oslo", "Rome")):
        own = [call for call in calls if call["index"] == index]
        assert own[0]["function"] == {"name": "get_weather", "arguments": ""}
        assert own[0]["id"].startswith("call_")
        assert all(set(call) == {"index", "function"} for call in own[1:])
        arguments = "".join(call["function"]["arguments"] for call in own)
        assert json.loads(arguments) == {"city": city}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in parts]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_reasoning_comes_out_and_goes_in():
    answers = [called("Oslo", thought="Where?"), said("Cold.", when="minus")]
    with scripted(*answers, family="qwen3") as server:
        first = server.post(PATH, body([user("weather?")], tools=TOOLS)).json()
        message = first["choices"][0]["message"]
        assert message["reasoning_content"] == "Where?"
        assert message["content"] is None
        assert first["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        history = [user("weather?"), message, *tool_messages(message, "minus 3")]
        second = server.post(PATH, body(history, tools=TOOLS)).json()
        before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 1


def test_stop_strings_and_limits_end_the_answer():
    with scripted(said("One two three.", repeat=True)) as server:
        stopped = server.post(PATH, body([user("a")], stop="two")).json()["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("One ", "stop")
        cut = server.post(PATH, body([user("b")], max_tokens=2)).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        cut = server.post(PATH, body([user("c")], max_completion_tokens=2)).json()
        assert cut["usage"]["completion_tokens"] == 2


def test_a_cut_answer_is_gone_on_with():
    with scripted(said("One two three."), said(" Four.")) as server:
        first = server.post(PATH, body([user("a")], max_tokens=2)).json()
        message = first["choices"][0]["message"]
        second = server.post(PATH, body([user("a"), message])).json()
        assert second["choices"][0]["message"]["content"].strip() == "Four."
        used = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert second["usage"]["prompt_tokens"] == used
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= used - 1


def test_a_call_that_cannot_be_read_is_text():
    raw = '<tool_call>\n{"nam'
    with scripted({"raw": raw}, said("Sorry.", when="again"), family="qwen3") as server:
        first = server.post(PATH, body([user("weather?")], tools=TOOLS)).json()
        (choice,) = first["choices"]
        assert choice["message"]["content"] == '{"nam'
        assert choice["finish_reason"] == "stop"
        history = [user("weather?"), choice["message"], user("again")]
        second = server.post(PATH, body(history, tools=TOOLS)).json()
        before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 1


def test_images_and_other_tools_are_left_out_with_a_warning():
    heard = "[image omitted]\n[image omitted]\n[part of an unknown type omitted]"
    with scripted(said("Fine.", when=heard)) as server:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        alien = {"type": "al\u00efen\n", "text": "x"}
        content = [{"type": "text", "text": "See:"}, picture, picture, alien]
        answer = server.post(
            PATH, body([user(content)], tools=[{"type": "custom", "custom": {}}], unknown=1)
        )
        assert answer.status_code == 200, answer.text
        said_of = answer.headers["X-AgentServe-Warning"]
        assert "image omitted (2)" in said_of
        assert "part of an unknown type omitted (1)" in said_of
        assert "tool of another type than function dropped (1)" in said_of
        metrics = server.http.get("/metrics").text
        assert 'agentserve_unknown_fields_total{dialect="chat"} 1.0' in metrics
        assert 'agentserve_omitted_parts_total{dialect="chat"} 4.0' in metrics


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"model": None}, "model"),
        ({"messages": []}, "input"),
        ({"messages": [{"role": "system", "content": "x"}]}, "input"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0]"),
        ({"messages": "x"}, "$.messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"temperature": 11}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": FIVE}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": 5}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(refusing, change, param):
    answer = refusing.post(PATH, body([user("hi")]) | change)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["type"] == "invalid_request_error"
    assert error["param"].removeprefix("$.") == param.removeprefix("$.")
    assert set(error) == {"message", "type", "param", "code"}
    assert refusing.metric("dialect_sessions") == 0
    assert refusing.http.get("/sessions").json()["sessions"] == []


def test_log_probabilities_are_beside_the_text_streamed_and_not():
    look = called("Oslo", text="I look: größer.", when="weather", repeat=True)
    with scripted(look, said("Cold.", repeat=True), family="qwen3") as server:
        asked = {"logprobs": True, "top_logprobs": 2, "tools": TOOLS}
        (choice,) = server.post(PATH, body([user("weather?")], **asked)).json()["choices"]
        told = choice["logprobs"]["content"]
        assert choice["message"]["tool_calls"]
        text = b"".join(bytes(one["bytes"]) for one in told).decode()
        assert choice["message"]["content"] in text
        assert all(len(one["top_logprobs"]) == 2 and one["logprob"] <= 0 for one in told)
        plain = server.post(PATH, body([user("now?")], logprobs=True)).json()["choices"][0]
        assert all(one["top_logprobs"] == [] for one in plain["logprobs"]["content"])
        without = server.post(PATH, body([user("and?")], logprobs=False)).json()["choices"][0]
        assert without["logprobs"] is None
        stream = server.post(PATH, body([user("weather?")], **asked, stream=True))
        choices = [chunk["choices"][0] for chunk in chat_chunks(stream.text)]
        beside = [one["logprobs"]["content"] for one in choices if one["logprobs"]]
        assert all(one["delta"].get("content") for one in choices if one["logprobs"])
        assert [one["token"] for part in beside for one in part] == [one["token"] for one in told]


def test_a_format_of_the_answer_does_not_forbid_calls():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answers = [called("Oslo"), said('{"a": 1}', when="sunny")]
    with scripted(*answers, said("{}", repeat=True)) as server:
        asked = {"response_format": form, "tools": TOOLS}
        first = server.post(PATH, body([user("hi")], **asked))
        message = first.json()["choices"][0]["message"]
        history = [user("hi"), message, *tool_messages(message)]
        second = server.post(PATH, body(history, **asked))
        assert second.json()["choices"][0]["message"]["content"] == '{"a": 1}'
        assert "tool_calls" not in second.json()["choices"][0]["message"]
        for answer in (first, second):
            assert "X-AgentServe-Warning" not in answer.headers
        forced = server.post(PATH, body([user("hi")], **asked, tool_choice="required"))
        assert "a call is required" in forced.headers["X-AgentServe-Warning"]


def test_a_prompt_that_does_not_fit_says_so_as_clients_expect():
    with scripted(said("x"), max_context=128, num_blocks=64) as server:
        answer = server.post(PATH, body([user("word " * 300)]))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_names_of_models_are_strict_only_when_asked():
    with scripted(said("x"), settings=ServerSettings(strict_model=True)) as server:
        answer = server.post(PATH, body([user("hi")]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert server.post(PATH, {"model": "smollm2-135m", "messages": [user("hi")]}).is_success
        assert server.http.get("/v1/models/other").status_code == 404


def test_keys_are_asked_for_in_the_dialects_words():
    with scripted(said("x"), settings=ServerSettings(api_keys=("k",)), key="k") as server:
        answer = server.post(PATH, body([user("hi")]), x_api_key="wrong")
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        answer = server.post("/v1/messages", {}, x_api_key="wrong")
        assert answer.json() == {
            "type": "error",
            "error": {"type": "authentication_error", "message": answer.json()["error"]["message"]},
            "request_id": answer.headers["request-id"],
        }


def test_every_answer_has_an_id_of_its_own():
    with scripted(said("x", repeat=True)) as server:
        answers = [
            server.post(PATH, body([user("hi")])),
            server.post(PATH, body([user("hi")], stream=True)),
            server.post(PATH, {}),
            server.post("/v1/nowhere", {}),
            server.http.get("/health"),
        ]
        ids = {answer.headers["x-request-id"] for answer in answers}
        assert len(ids) == len(answers)
        assert all(one.startswith("req_") for one in ids)


def test_too_much_at_once_is_a_429_with_a_time_to_wait():
    with scripted(said("x"), settings=ServerSettings(max_open_turns=0)) as server:
        answer = server.post(PATH, body([user("hi")]))
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["Retry-After"]) >= 1
        assert "x-should-retry" not in answer.headers
