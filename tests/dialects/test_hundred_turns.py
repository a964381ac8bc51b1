import itertools
import json

import pytest
from scripted import WEATHER, called, said, scripted

pytestmark = pytest.mark.model
TURNS = 100
TOOLS = [{"type": "function", "function": WEATHER}]
SCRIPT = [
    called(f"City {number}", text=f"Step {number}.", when=f"result {number - 1} ")
    if number % 10
    else said(f"Leg {number} is done.", when=f"result {number - 1} ")
    for number in range(1, TURNS)
]


def result(number):
    return f"result {number} of the tool: " + "fair " * 20


def script():
    return [called("City 0", when="begin"), *SCRIPT]


def native():
    """Return what prefill computes in each turn of a native session."""
    computed = []
    with scripted(*script()) as server:
        create = {"tools": [{"type": "function", **WEATHER}], "system": "Be."}
        session = server.http.post("/sessions", json=create).json()["id"]
        given = "begin"
        for number in range(TURNS):
            turn = server.http.post(f"/sessions/{session}/turn", json={"input": given}).json()
            assert turn["status"] == "completed", turn
            computed.append(turn["usage"]["input_tokens"] - turn["usage"]["cached_tokens"])
            calls = turn["pending_calls"]
            given = result(number)
            if calls:
                call = calls[0]["call_id"]
                given = [{"type": "tool_result", "call_id": call, "output": result(number)}]
    return computed


def resent():
    """Return the same through chat completions, and the lookups up to some turns."""
    computed, lookups, prompts = [], {}, []
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "begin"}]
    with scripted(*script()) as server:
        for number in range(TURNS):
            body = {"model": "m", "messages": messages, "tools": TOOLS}
            whole = server.post("/v1/chat/completions", body).json()
            if number in (0, 1, 2, 50, 51, 98, 99):
                lookups[number] = server.metric("dialect_lookups_total")
            usage = whole["usage"]
            prompts.append(usage)
            computed.append(
                usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            )
            message = whole["choices"][0]["message"]
            text = result(number)
            said_next = {"role": "user", "content": text}
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
                said_next = {"role": "tool", "tool_call_id": call["id"], "content": text}
            messages += [message, said_next]
        assert server.metric("dialect_sessions") == 1
        assert server.metric("dialect_imported_answers_total") == 0
    for earlier, later in itertools.pairwise(prompts):
        used = earlier["prompt_tokens"] + earlier["completion_tokens"]
        assert later["prompt_tokens_details"]["cached_tokens"] >= used - 1
    return computed, lookups


def test_a_history_resent_for_100_turns_costs_what_a_session_costs():
    computed, lookups = resent()
    own = native()
    print(f"prefill computed: {sum(computed)} resent, {sum(own)} native")
    assert sum(computed) <= 1.02 * sum(own)
    assert lookups == {number: number for number in lookups}  # one a turn, after the first
