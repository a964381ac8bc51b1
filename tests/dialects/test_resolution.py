import concurrent.futures
import time

import pytest
from scripted import WEATHER, called, said, scripted

from agentserve.config import ServerSettings

pytestmark = pytest.mark.model
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOOLS = [{"type": "function", "function": WEATHER}]
BAD = {"type": "array"}


def user(text):
    return {"role": "user", "content": text}


def chat(server, messages, *, body=None, **headers):
    """Run one turn; return its message, its session and its usage."""
    given = {"model": "m", "messages": messages, **(body or {})}
    answer = server.post(CHAT, given, **headers)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    session = answer.headers["X-AgentServe-Session"]
    return whole["choices"][0]["message"], session, whole["usage"]


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def reused(before, after):
    return cached(after) >= before["total_tokens"] - 1


@pytest.mark.parametrize(
    ("signal", "body", "headers"),
    [
        ("session_id", {}, {"X_AgentServe_Session": "run-7"}),
        ("session_id", {}, {"X_Session_ID": "run-7"}),
        ("session_id", {"session_id": "run-7"}, {}),
        ("header", {}, {"X_Claude_Code_Session_Id": "5f6f9f2e-77"}),
        ("header", {}, {"X_Session_Affinity": "abc"}),
        ("header", {}, {"X_Litellm_Session_Id": "abc"}),
        ("header", {}, {"X_Some_New_Session_Id": "abcdefgh"}),
        ("header", {}, {"session_id": "uuid-1", "originator": "codex_cli"}),
        ("metadata", {"metadata": {"session_id": "abc"}}, {}),
        ("metadata", {"metadata": {"user_id": "user_1_account__session_01234567-89"}}, {}),
        ("metadata", {"metadata": {"user_id": '{"session_id": "abc"}'}}, {}),
        ("cache_key", {"prompt_cache_key": "abc"}, {}),
        ("prefix", {"user": "me", "safety_identifier": "me"}, {}),
        ("prefix", {}, {"session_id": "uuid-1"}),
        ("prefix", {}, {"X_Some_New_Session_Id": "no!"}),
        ("prefix", {}, {"X_Other_Parent_Session_Id": "abcdefgh"}),
    ],
)
def test_a_signal_stands_for_its_session(server, signal, body, headers):
    before = server.resolved()
    messages = [user(f"start {signal} {body} {headers}")]
    answer, session, first = chat(server, messages, body=body, **headers)
    if signal == "session_id":
        assert session == "run-7"
    messages += [answer, user("go on")]
    _, again, second = chat(server, messages, body=body, **headers)
    assert again == session
    assert reused(first, second)
    after = server.resolved()
    assert after["new"] == before.get("new", 0) + 1
    assert after[signal] == before.get(signal, 0) + 1
    server.http.delete(f"/sessions/{session}")


@pytest.fixture(scope="module")
def server():
    with scripted(said("Yes.", repeat=True)) as running:
        yield running


def test_of_equal_histories_the_one_that_the_signal_names_goes_on(server):
    sessions = {}
    for name in ("left-twin", "right-twin"):
        answer, sessions[name], _ = chat(
            server, [user("we are twins")], body={"prompt_cache_key": name}
        )
    assert len(set(sessions.values())) == 2
    for name in ("left-twin", "right-twin"):
        messages = [user("we are twins"), answer, user("go on")]
        _, session, _ = chat(server, messages, body={"prompt_cache_key": name})
        assert session == sessions[name]


def test_the_session_header_of_an_answer_names_the_session_of_the_next_request(server):
    for name in ("left", "right"):  # two sessions with one history
        answer, session, _ = chat(server, [user("echo")], body={"prompt_cache_key": name})
        before = server.resolved().get("session_id", 0)
        messages = [user("echo"), answer, user("go on")]
        _, again, _ = chat(server, messages, X_AgentServe_Session=session)
        assert again == session
        assert server.resolved()["session_id"] == before + 1


def test_a_signal_is_no_proof_the_history_decides(server):
    key = {"prompt_cache_key": "shared"}
    answer, first, _ = chat(server, [user("one story")], body=key)
    _, other, _ = chat(server, [user("another story")], body=key)
    assert other != first
    _, again, _ = chat(server, [user("one story"), answer, user("go on")], body=key)
    assert again == first


def test_what_one_principal_said_is_nothing_to_another():
    settings = ServerSettings(api_keys=("a", "b"))
    with scripted(said("Yes.", repeat=True), settings=settings, key="a") as server:
        answer, first, _ = chat(server, [user("secret")], X_Session_ID="mine")
        messages = [user("secret"), answer, user("go on")]
        _, other, usage = chat(server, messages, X_Session_ID="mine", x_api_key="b")
        assert cached(usage) == 0
        assert server.http.get(f"/sessions/{first}").json()["turns"] == 1
        assert other == "mine"  # its own


def test_requests_at_once_branch_and_each_branch_goes_on(server):
    answer, _, first = chat(server, [user("shared beginning")])
    words = [f"branch {number}" for number in range(6)]

    def run(word):
        return chat(server, [user("shared beginning"), answer, user(word)])

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        branches = list(pool.map(run, words))
    assert all(reused(first, usage) for _, _, usage in branches)
    for word, (message, _, usage) in zip(words, branches, strict=True):
        messages = [user("shared beginning"), answer, user(word), message, user("more")]
        _, _, later = chat(server, messages)
        # A session whose head moved meanwhile has lost at most the block that was not full.
        assert cached(later) >= usage["total_tokens"] - 16


def test_a_busy_session_is_branched_and_never_a_conflict():
    answers = [said("A.", when="start"), said("word " * 200, when="long"), said("B.", when="side")]
    with scripted(*answers) as server:
        answer, session, first = chat(server, [user("start")])
        history = [user("start"), answer]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            long = pool.submit(chat, server, [*history, user("long")])
            while server.http.get(f"/sessions/{session}").json()["state"] == "idle":
                time.sleep(0.001)
            _, branch, usage = chat(server, [*history, user("side")])
            busy = not long.done()
            long.result()
        assert reused(first, usage)
        if busy:
            assert branch != session


def test_a_client_that_goes_back_is_followed_and_can_return(server):
    a, session, first = chat(server, [user("root of a tree")])
    b, _, second = chat(server, [user("root of a tree"), a, user("left")])
    _, again, other = chat(server, [user("root of a tree"), a, user("right")])
    assert again == session
    assert reused(first, other)
    messages = [user("root of a tree"), a, user("left"), b, user("on")]
    _, back, third = chat(server, messages)
    assert back == session
    assert third["prompt_tokens"] > second["total_tokens"]


def test_a_side_request_while_tools_run_leaves_the_loop_alone():
    answers = [said("One.", when="start"), called("Oslo"), said("Title.", when="title")]
    with scripted(*answers, said("Nice.", when="sunny")) as server:
        a, session, first = chat(server, [user("start")], body={"tools": TOOLS})
        history = [user("start"), a, user("weather?")]
        b, same, second = chat(server, history, body={"tools": TOOLS})
        _, side, aside = chat(server, [user("start"), a, user("title")], body={"tools": TOOLS})
        assert reused(first, aside)
        result = {"role": "tool", "tool_call_id": b["tool_calls"][0]["id"], "content": "sunny"}
        _, again, third = chat(server, [*history, b, result], body={"tools": TOOLS})
        assert session == same == again != side
        assert reused(second, third)


def test_the_same_request_again_is_answered_again(server):
    a, _, _ = chat(server, [user("retry me")])
    for _ in range(3):
        message, _, _ = chat(server, [user("retry me"), a, user("now")])
        assert message["content"] == "Yes."


def test_an_edited_answer_keeps_what_stands_before_it(server):
    story = "a long beginning " * 40
    a, session, first = chat(server, [user(story)])
    b, _, _ = chat(server, [user(story), a, user("second")])
    edited = {**b, "content": "No, never."}
    messages = [user(story), a, user("second"), edited, user("third")]
    c, same, third = chat(server, messages)
    assert same == session
    assert cached(third) >= first["total_tokens"] - 1
    transcript = server.http.get(f"/sessions/{session}/transcript?format=openai").json()
    assert [one["content"] for one in transcript if one["role"] == "assistant"] == [
        "Yes.",
        "No, never.",
        "Yes.",
    ]
    messages += [c, user("fourth")]
    _, _, fourth = chat(server, messages)
    assert reused(third, fourth)


def test_a_foreign_history_is_taken_in_once_and_then_goes_on(server):
    messages = [user("old"), {"role": "assistant", "content": "times", "tool_calls": None}]
    messages += [user("older"), {"role": "assistant", "content": "still"}, user("now")]
    a, session, first = chat(server, messages)
    _, same, second = chat(server, [*messages, a, user("on")])
    assert same == session
    assert reused(first, second)


def test_foreign_calls_have_their_results_and_missing_ones_are_cancelled(server):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": "{oops"}}
    messages = [
        user("x"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", **call}, {"id": "b", **call}, {"id": "a", **call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "a", "content": "two"},
        user("go on"),
    ]
    a, session, first = chat(server, messages, body={"tools": TOOLS})
    _, same, second = chat(server, [*messages, a, user("on")], body={"tools": TOOLS})
    assert same == session
    assert reused(first, second)
    transcript = server.http.get(f"/sessions/{session}/transcript?format=openai").json()
    outputs = [one["content"] for one in transcript if one["role"] == "tool"]
    assert outputs == ["one", "[cancelled: the conversation went on without it]", "two"]


def test_pending_calls_are_cancelled_when_the_user_speaks_instead():
    with scripted(called("Oslo"), said("Fine.", when="never mind")) as server:
        a, session, first = chat(server, [user("weather?")], body={"tools": TOOLS})
        messages = [user("weather?"), a, user("never mind")]
        b, same, second = chat(server, messages, body={"tools": TOOLS})
        assert (b["content"], same) == ("Fine.", session)
        assert reused(first, second)


def test_other_tools_keep_the_generated_tokens_in_a_branch():
    with scripted(called("Oslo"), said("Nice.", repeat=True)) as server:
        a, session, _ = chat(server, [user("weather?")], body={"tools": TOOLS})
        more = [*TOOLS, {"type": "function", "function": {**WEATHER, "name": "get_tides"}}]
        result = {"role": "tool", "tool_call_id": a["tool_calls"][0]["id"], "content": "sunny"}
        messages = [user("weather?"), a, result]
        b, branch, second = chat(server, messages, body={"tools": more})
        assert (b["content"], branch != session) == ("Nice.", True)
        _, same, third = chat(server, [*messages, b, user("on")], body={"tools": more})
        assert same == branch
        assert reused(second, third)
        _, old, _ = chat(server, messages, body={"tools": TOOLS})
        assert old == session


def test_a_session_of_the_native_api_can_be_gone_on_with():
    answers = [called("Oslo", text="I look."), said("Nice.", when="sunny")]
    with scripted(*answers) as server:
        tool = {"type": "function", **WEATHER}
        server.http.post("/sessions", json={"id": "run-1", "system": "Be.", "tools": [tool]})
        turn = server.http.post("/sessions/run-1/turn", json={"input": "weather?"}).json()
        call = {"id": "x", "type": "function", "function": {"name": "get_weather"}}
        call["function"]["arguments"] = '{"city":"Oslo"}'
        messages = [
            {"role": "system", "content": "Be."},
            user("weather?"),
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": "sunny"},
        ]
        answer, session, usage = chat(server, messages, body={"tools": TOOLS}, X_Session_ID="run-1")
        assert (answer["content"], session) == ("Nice.", "run-1")
        before = turn["usage"]["input_tokens"] + turn["usage"]["output_tokens"]
        assert cached(usage) >= before - 1


def test_dialects_share_sessions():
    with scripted(said("Yes.", repeat=True)) as server:
        a, session, first = chat(server, [user("one")])
        messages = [user("one"), {"role": "assistant", "content": a["content"]}, user("two")]
        answer = server.post(MESSAGES, {"model": "m", "max_tokens": 9, "messages": messages})
        assert answer.headers["X-AgentServe-Session"] == session
        assert answer.json()["usage"]["cache_read_input_tokens"] >= first["total_tokens"] - 1


def test_sessions_are_bounded_and_the_oldest_go():
    settings = ServerSettings(dialect_sessions=5)
    with scripted(said("Yes.", repeat=True), settings=settings) as server:
        server.http.post("/sessions", json={"id": "native"})
        made = [chat(server, [user(f"story {number}")]) for number in range(12)]
        assert server.metric("dialect_sessions") == 5
        assert server.metric("dialect_evictions_total") == 7
        left = {one["id"] for one in server.http.get("/sessions").json()["sessions"]}
        assert left == {"native", *(session for _, session, _ in made[-5:])}
        messages = [user("story 0"), made[0][0], user("go on")]
        assert chat(server, messages)[0]["content"] == "Yes."


def test_a_full_quota_makes_room_by_itself():
    settings = ServerSettings(max_sessions=4, dialect_sessions=100)
    with scripted(said("Yes.", repeat=True), settings=settings) as server:
        for number in range(9):
            chat(server, [user(f"story {number}")])
        assert len(server.http.get("/sessions").json()["sessions"]) == 4


def test_a_session_that_was_deleted_is_begun_anew(server):
    a, session, _ = chat(server, [user("delete me")])
    server.http.delete(f"/sessions/{session}")
    _, other, _ = chat(server, [user("delete me"), a, user("go on")])
    assert other != session


def test_a_refused_turn_leaves_no_session_behind():
    with scripted(said("Yes."), max_context=256, num_blocks=64) as server:
        body = {"model": "m", "messages": [user("word " * 400)]}
        assert server.post(CHAT, body).status_code == 400
        assert server.http.get("/sessions").json()["sessions"] == []


def test_a_refused_turn_leaves_no_branch_behind(server):
    messages = [user(f"branches {time.monotonic()}")]
    answer, _, first = chat(server, messages)
    messages += [answer, user("go on")]
    cases = [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}]}, ""),
        ({"tools": TOOLS}, "word " * 20_000),
        ({"chat_template_kwargs": {"a": 1}}, "word " * 20_000),
    ]
    before = server.metric("dialect_sessions")
    for body, more in cases:
        said_now = [*messages[:-1], user(messages[-1]["content"] + more)]
        refused = server.post(CHAT, {"model": "m", "messages": said_now, **body})
        assert refused.status_code == 400, refused.text
    assert server.metric("dialect_sessions") == before
    assert reused(first, chat(server, messages)[2])


def test_a_refused_turn_leaves_no_branch_of_a_session_that_awaits_its_tools():
    with scripted(called("Oslo", repeat=True)) as server:
        messages = [user("weather?")]
        answer, *_ = chat(server, messages, body={"tools": TOOLS})
        chat(server, [*messages, answer, user("never mind")], body={"tools": TOOLS})
        long = {"model": "m", "messages": [*messages, answer, user("word " * 20_000)]}
        assert server.post(CHAT, long | {"tools": TOOLS}).status_code == 400
        assert server.metric("dialect_sessions") == 1
