import json

import pytest
from scripted import WEATHER, called, named_events, said, scripted

pytestmark = pytest.mark.model
PATH = "/v1/messages"
TOOLS = [{"name": "get_weather", "input_schema": WEATHER["parameters"]}]


def body(messages, **more):
    return {"model": "any", "max_tokens": 200, "messages": messages, **more}


def user(content):
    return {"role": "user", "content": content}


def results(message, text="sunny"):
    return user(
        [
            {"type": "tool_result", "tool_use_id": block["id"], "content": text}
            for block in message["content"]
            if block["type"] == "tool_use"
        ]
    )


def input_tokens(usage):
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.fixture(scope="module")
def server():
    with scripted(said("Yes.", repeat=True)) as running:
        yield running


def test_an_answer_has_its_blocks_and_counts(server):
    answer = server.post(PATH, body([user("Hi")], stop_sequences=["zz"]))
    whole = answer.json()
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "any")
    assert whole["content"] == [{"type": "text", "text": "Yes.", "citations": None}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert whole["usage"]["output_tokens"] > 0
    assert answer.headers["X-AgentServe-Session"]
    assert answer.headers["request-id"].startswith("req_")
    assert "total;dur=" in answer.headers["Server-Timing"]


def test_the_reason_of_the_end_is_told(server):
    cut = server.post(PATH, body([user("Hi")]) | {"max_tokens": 1}).json()
    assert cut["stop_reason"] == "max_tokens"
    stopped = server.post(PATH, body([user("Hi!")], stop_sequences=["es"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "es")
    stopped = server.post(PATH, body([user("Hi!")], stop_sequences=["zz", "es"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", None)


def test_a_tool_loop_is_streamed_and_reuses_everything():
    answers = [
        called("Oslo", "Rome", text="I look.", thought="Where?"),
        said("Nice.", when="sunny"),
    ]
    with scripted(*answers, family="qwen3") as server:
        blocks = [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]
        system = [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "Be brief."},
        ]
        asked = body([user(blocks)], tools=TOOLS, system=system, stream=True)
        answer = server.post(PATH, asked)
        assert "event: ping" in answer.text
        events = named_events(answer.text)
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        started = [e for e in events if e["type"] == "content_block_start"]
        assert [e["index"] for e in started] == [0, 1, 2, 3]
        shapes = [e["content_block"]["type"] for e in started]
        assert shapes == ["thinking", "text", "tool_use", "tool_use"]
        assert started[2]["content_block"]["input"] == {}
        for index in range(4):
            own = [e["type"] for e in events if e.get("index") == index]
            assert own[0] == "content_block_start"
            assert own[-1] == "content_block_stop"
            assert set(own[1:-1]) == {"content_block_delta"}
        signed = [e["delta"] for e in events if e.get("index") == 0 and "delta" in e][-1]
        assert signed == {"type": "signature_delta", "signature": ""}
        message = folded(events)
        assert [block.get("input") for block in message["content"][2:]] == [
            {"city": "Oslo"},
            {"city": "Rome"},
        ]
        first = events[0]["message"]["usage"] | events[-2]["usage"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"

        system[0]["text"] = "x-anthropic-billing-header: cc_version=2; cch=2;"
        again = body([user("weather?"), message, results(message)], tools=TOOLS, system=system)
        second = server.post(PATH, again).json()
        assert second["content"][0]["text"] == "Nice."
        before = input_tokens(first) + first["output_tokens"]
        assert second["usage"]["cache_read_input_tokens"] >= before - 1
        assert server.resolved() == {"new": 1, "call_id": 1}


def folded(events):
    """Return the message of a stream, as an accumulator makes it."""
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            (field, value) = list(event["delta"].items())[1]
            target = "json" if field == "partial_json" else field
            blocks[-1][target] = blocks[-1].get(target, "") + value
    for block in blocks:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    return {"role": "assistant", "content": blocks}


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_what_a_client_drops_or_adds_does_not_count(family):
    thought = "Where?" if family == "qwen3" else ""
    answers = [called("Oslo", text="I look.", thought=thought), said("Nice.", when="sunny")]
    with scripted(*answers, family=family) as server:
        first = server.post(PATH, body([user("weather?")], tools=TOOLS)).json()
        kept = [block for block in first["content"] if block["type"] != "thinking"]
        fed = results(first)
        if family == "smollm2":  # Qwen3's template rewrites the past at anything of the user's
            fed["content"].append({"type": "text", "text": "<system-reminder>x</system-reminder>"})
        again = [user("weather?"), {"role": "assistant", "content": kept}, fed]
        second = server.post(PATH, body(again, tools=TOOLS)).json()
        before = input_tokens(first["usage"]) + first["usage"]["output_tokens"]
        assert second["usage"]["cache_read_input_tokens"] >= before - 1


def test_system_messages_may_stand_in_the_conversation(server):
    messages = [user("a"), {"role": "assistant", "content": "Yes."}]
    messages += [{"role": "system", "content": "Now be quick."}, user("b")]
    assert server.post(PATH, body(messages)).status_code == 200


def test_tokens_are_counted_without_a_session(server):
    before = server.metric("dialect_sessions")
    counted = server.post(f"{PATH}/count_tokens", {"model": "m", "messages": [user("count me")]})
    assert server.metric("dialect_sessions") == before
    run = server.post(PATH, body([user("count me")])).json()
    assert counted.json()["input_tokens"] == input_tokens(run["usage"])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"max_tokens": None}, "invalid_request_error"),
        ({"messages": []}, "invalid_request_error"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "invalid_request_error"),
        ({"messages": [user([{"type": "tool_result", "tool_use_id": "x"}])]}, None),
        ({"tool_choice": {"type": "tool", "name": "x"}}, None),
        ({"tool_choice": {"type": "any"}}, None),
        ({"messages": [user("word " * 20_000)]}, "invalid_request_error"),
    ],
)
def test_what_cannot_be_done_is_a_400(server, change, kind):
    answer = server.post(PATH, body([user("hi")]) | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == (kind or "invalid_request_error")


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(server):
    answer = server.post(PATH, body([user("word " * 20_000)]))
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")


def test_keeping_all_thinking_keeps_the_past_as_it_is():
    answers = [said("One.", when="a"), said("Two.", when="b")]
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for management, kept in ((keep, True), (None, False)):
        thinking = {"output": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "A"}]}
        with scripted(thinking | {"when": "q1"}, *answers, family="qwen3") as server:
            more = {"context_management": management} if management else {}
            first = server.post(PATH, body([user("q1")], **more)).json()
            message = {"role": "assistant", "content": first["content"]}
            second = server.post(PATH, body([user("q1"), message, user("b")], **more)).json()
            before = input_tokens(first["usage"]) + first["usage"]["output_tokens"]
            assert (second["usage"]["cache_read_input_tokens"] >= before - 1) is kept
