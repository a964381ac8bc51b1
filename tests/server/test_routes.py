import json
from collections.abc import Iterator

import httpx
import pytest
from served import Served, parse_events, served

from agentserve import wire
from agentserve.config import ServerSettings
from agentserve.engine.oracle import oracle_next
from agentserve.errors import CATALOGUE

TOOL = {
    "type": "function",
    "name": "grep",
    "description": "Search.",
    "parameters": {"type": "object", "properties": {"pattern": {"type": "string"}}},
}
CALL = {"type": "tool_call", "name": "grep", "arguments": {"pattern": "x"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServerSettings(allow_force=True)) as running:
        yield running


def calling_session(server: Served) -> tuple[str, str]:
    """Return a session whose turn ended in one call, and the call's id."""
    session = server.create(tools=[TOOL])
    turn = server.turn(session, debug={"force": [CALL]}, max_output_tokens=100)
    assert turn["stop_reason"] == "tool_calls", turn
    return session, turn["pending_calls"][0]["call_id"]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert answer.status_code == CATALOGUE[error["code"]].status
    assert error["retryable"] is CATALOGUE[error["code"]].retryable
    assert error["message"]
    return answer.status_code, error["code"]


def test_health_and_ready_answer(server: Served) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_the_model_is_listed(server: Served) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "smollm2-135m"


def test_a_session_is_created_once_and_then_found(server: Served) -> None:
    body = {"id": "run-7", "system": "Be brief.", "metadata": {"a": 1}}
    first = server.http.post("/sessions", json=body)
    second = server.http.post("/sessions", json=body)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"] == "run-7"
    other = server.http.post("/sessions", json=body | {"system": "Be long."})
    assert error_of(other) == (409, "session_exists")
    assert other.headers["x-should-retry"] == "false"


def test_an_empty_body_creates_a_session_with_defaults(server: Served) -> None:
    answer = server.http.post("/sessions")
    assert answer.status_code == 201
    info = answer.json()
    assert info["state"] == "idle"
    assert info["head"] is None
    assert server.http.get(f"/sessions/{info['id']}").json()["id"] == info["id"]


def test_a_turn_gives_the_tokens_of_the_oracle_and_is_listed(server: Served) -> None:
    session = server.create()
    turn = server.turn(session)
    assert turn["status"] == "incomplete" or turn["stop_reason"] == "max_tokens"
    assert turn["usage"]["output_tokens"] == 4
    tokens = server.http.get(f"/sessions/{session}/transcript?format=tokens").json()["tokens"]
    log = tokens[: turn["usage"]["input_tokens"]]
    for token in tokens[turn["usage"]["input_tokens"] :][:4]:
        assert token == oracle_next(log, 49152)
        log.append(token)
    assert server.http.get(f"/sessions/{session}/turns").json()["turns"] == [turn]
    assert server.http.get(f"/sessions/{session}/turns/{turn['id']}").json() == turn


def test_a_second_turn_computes_only_what_is_new(server: Served) -> None:
    session = server.create()
    first = server.turn(session)
    second = server.turn(session, "and now")
    usage = second["usage"]
    assert second["previous"] == first["id"]
    assert usage["cached_tokens"] > 0
    assert usage["input_tokens"] - usage["cached_tokens"] == usage["new_tokens"]


def test_a_streamed_turn_equals_the_unstreamed_one(server: Served) -> None:
    plain = server.turn(server.create(), max_output_tokens=24)
    events = server.stream(server.create(), max_output_tokens=24)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events].count("turn.done") == 1
    done = events[-1]["turn"]
    assert [item["text"] for item in done["output"]] == [item["text"] for item in plain["output"]]
    deltas = "".join(event["delta"] for event in events if event["type"] == "text.delta")
    assert deltas == "".join(item["text"] for item in done["output"])
    same = ("status", "stop_reason", "context")
    assert {key: done[key] for key in same} == {key: plain[key] for key in same}


def test_a_streamed_call_is_whole_before_the_turn_ends(server: Served) -> None:
    fields = {"debug": {"force": [CALL]}, "max_output_tokens": 100}
    plain = server.turn(server.create(tools=[TOOL]), **fields)
    events = server.stream(server.create(tools=[TOOL]), **fields)
    (done,) = [event for event in events if event["type"] == "item.done"]
    assert done["item"]["arguments"] == CALL["arguments"]
    fragments = [event["delta"] for event in events if event["type"] == "tool_call.delta"]
    assert json.loads("".join(fragments)) == CALL["arguments"]
    assert events[-1]["turn"]["output"] == [done["item"]]
    names = [
        [(item["type"], item["name"]) for item in turn["output"]]
        for turn in (plain, events[-1]["turn"])
    ]
    assert names[0] == names[1]
    assert events[-1]["turn"]["pending_calls"][0]["call_id"] == done["item"]["call_id"]


def test_the_events_of_an_ended_turn_can_be_read_again(server: Served) -> None:
    session = server.create()
    events = server.stream(session, max_output_tokens=16)
    turn = events[-1]["turn"]["id"]
    path = f"/sessions/{session}/turns/{turn}/events"
    assert parse_events(server.http.get(path).text) == events
    middle = events[len(events) // 2]["seq"]
    rest = [event for event in events if event["seq"] > middle]
    assert parse_events(server.http.get(f"{path}?after={middle}").text) == rest
    resumed = server.http.get(path, headers={"Last-Event-ID": str(middle)})
    assert parse_events(resumed.text) == rest
    stale = server.http.get(f"{path}?after=1", headers={"Last-Event-ID": str(middle)})
    assert parse_events(stale.text) == rest


def test_a_resumed_stream_always_ends_with_the_terminal_event(server: Served) -> None:
    session = server.create()
    events = server.stream(session)
    path = f"/sessions/{session}/turns/{events[-1]['turn']['id']}/events"
    for after in (events[-1]["seq"], 10**6):
        last = parse_events(server.http.get(f"{path}?after={after}").text)
        assert [event["type"] for event in last] == ["turn.done"]


def test_a_forced_call_waits_for_its_result_and_goes_on(server: Served) -> None:
    session, call = calling_session(server)
    assert server.http.get(f"/sessions/{session}").json()["state"] == "awaiting_tools"
    missing = server.http.post(f"/sessions/{session}/turn", json={"input": "so?"})
    assert error_of(missing) == (409, "tool_results_missing")
    result = {"type": "tool_result", "call_id": call, "output": "3 matches"}
    staged = server.http.post(f"/sessions/{session}/tool_results", json={"results": [result]})
    assert staged.status_code == 200
    assert staged.json()["staged"] == [call]
    assert staged.json()["pending_calls"] == []
    again = server.http.post(f"/sessions/{session}/tool_results", json={"results": [result]})
    assert again.status_code == 200
    conflict = server.http.post(
        f"/sessions/{session}/tool_results", json={"results": [result | {"output": "4"}]}
    )
    assert error_of(conflict) == (422, "result_conflict")
    unknown = server.http.post(
        f"/sessions/{session}/tool_results", json={"results": [result | {"call_id": "call_x"}]}
    )
    assert error_of(unknown) == (422, "unknown_call_id")
    after = server.http.post(
        f"/sessions/{session}/turn", json={"input": [], "max_output_tokens": 2}
    )
    assert after.status_code == 200
    assert after.json()["pending_calls"] == []


def test_hints_are_taken_without_an_answer(server: Served) -> None:
    session = server.create()
    answer = server.http.post(f"/sessions/{session}/hints", json={"expected_ms": 30_000})
    assert (answer.status_code, answer.content) == (204, b"")


def test_forks_go_their_own_way(server: Served) -> None:
    session = server.create()
    first = server.turn(session)
    answer = server.http.post(f"/sessions/{session}/fork", json={"n": 2})
    assert answer.status_code == 201
    forks = [fork["id"] for fork in answer.json()["sessions"]]
    assert len({session, *forks}) == 3
    turns = [server.turn(one, "next") for one in (session, *forks)]
    assert len({json.dumps([item["text"] for item in turn["output"]]) for turn in turns}) == 1
    assert {turn["previous"] for turn in turns} == {first["id"]}


def test_a_rollback_moves_the_head_and_keeps_tokens(server: Served) -> None:
    session = server.create()
    first, second = server.turn(session), server.turn(session, "more")
    answer = server.http.post(f"/sessions/{session}/rollback", json={"before": second["id"]})
    assert answer.status_code == 200
    assert answer.json()["head"] == first["id"]
    assert answer.json()["kept_tokens"] > 0
    again = server.turn(session, "more")
    assert [item["text"] for item in again["output"]] == [item["text"] for item in second["output"]]
    moved = server.http.post(
        f"/sessions/{session}/turn", json={"input": "x", "expect_head": first["id"]}
    )
    assert error_of(moved) == (409, "head_moved")


def test_a_history_can_be_replaced(server: Served) -> None:
    session = server.create()
    first = server.turn(session)
    server.turn(session, "more")
    items = [{"ref": first["id"]}, {"type": "user", "content": "instead"}]
    answer = server.http.put(f"/sessions/{session}/history", json={"items": items})
    assert answer.status_code == 200
    assert answer.json()["kept_tokens"] >= first["usage"]["input_tokens"]


def test_counting_runs_nothing(server: Served) -> None:
    session = server.create()
    answer = server.http.post(f"/sessions/{session}/count", json={"input": "hello"})
    assert answer.status_code == 200
    turn = server.turn(session)
    assert answer.json()["input_tokens"] == turn["usage"]["input_tokens"]


def test_a_patch_changes_metadata_and_says_what_it_costs(server: Served) -> None:
    session = server.create(metadata={"a": 1})
    answer = server.http.patch(f"/sessions/{session}", json={"metadata": {"b": 2}})
    assert answer.status_code == 200
    assert answer.json()["recomputed"] == []
    assert server.http.get(f"/sessions/{session}").json()["metadata"] == {"b": 2}


def test_a_cancel_without_a_running_turn_is_answered(server: Served) -> None:
    session = server.create()
    turn = server.turn(session)
    answer = server.http.post(f"/sessions/{session}/cancel", json={"turn": turn["id"]})
    assert answer.status_code == 200
    assert answer.json()["id"] == turn["id"]


@pytest.mark.parametrize("form", ["items", "openai", "anthropic", "tokens"])
def test_a_transcript_is_exported_in_each_format(server: Served, form: str) -> None:
    session, _ = calling_session(server)
    answer = server.http.get(f"/sessions/{session}/transcript?format={form}")
    assert answer.status_code == 200
    assert ("grep" in answer.text) is (form != "tokens")


def test_a_deleted_session_is_gone_and_frees_its_id(server: Served) -> None:
    session = server.create(id="short-lived")
    server.turn(session)
    answer = server.http.delete(f"/sessions/{session}")
    assert (answer.status_code, answer.content) == (204, b"")
    gone = server.http.post(f"/sessions/{session}/turn", json={"input": "x"})
    assert error_of(gone) in {(404, "session_not_found"), (410, "session_closed")}


def test_a_deleted_session_can_keep_its_transcript(server: Served) -> None:
    session = server.create(system="Remember.")
    server.turn(session)
    assert server.http.delete(f"/sessions/{session}?keep=transcript").status_code == 204
    assert "hello" in server.http.get(f"/sessions/{session}/transcript").text
    turn = server.http.post(f"/sessions/{session}/turn", json={"input": "x"})
    assert error_of(turn) == (410, "session_closed")


def test_lists_are_filtered_and_paged(server: Served) -> None:
    made = {server.create() for _ in range(5)}
    seen: list[str] = []
    after = ""
    while True:
        page = server.http.get(f"/sessions?limit=2{after}").json()
        assert len(page["sessions"]) <= 2
        seen += [session["id"] for session in page["sessions"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert made <= set(seen)
    assert len(seen) == len(set(seen))
    waiting = server.http.get("/sessions?state=awaiting_tools&limit=1000").json()["sessions"]
    assert {session["state"] for session in waiting} <= {"awaiting_tools"}
    held = server.http.get("/sessions?tier=device&limit=1000").json()["sessions"]
    assert all(session["kv"]["device"] > 0 for session in held)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "state=odd", "tier=tape", "after=%00", "odd=1",
              "limit=1&limit=2"],
)  # fmt: skip
def test_a_bad_filter_is_refused(server: Served, query: str) -> None:
    assert error_of(server.http.get(f"/sessions?{query}")) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nope", (404, "route_not_found")),
        ("GET", "/sessions/", (404, "route_not_found")),
        ("GET", "/sessions/absent", (404, "session_not_found")),
        ("GET", "/sessions/%00", (404, "session_not_found")),
        ("POST", "/sessions/absent/turn", (400, "invalid_request")),
        ("DELETE", "/sessions", (405, "method_not_allowed")),
        ("GET", "/sessions/absent/turn", (405, "method_not_allowed")),
        ("OPTIONS", "/sessions", (405, "method_not_allowed")),
    ],
)
def test_what_the_router_refuses_has_the_error_shape(
    server: Served, method: str, path: str, expected: tuple[int, str]
) -> None:
    assert error_of(server.http.request(method, path)) == expected


def test_a_parameter_that_a_route_does_not_know_is_refused(server: Served) -> None:
    session = server.create()
    for method, path in [("GET", ""), ("GET", "/turns"), ("DELETE", ""), ("POST", "/hints")]:
        answer = server.http.request(method, f"/sessions/{session}{path}?odd=1")
        assert error_of(answer) == (400, "invalid_request")
    assert server.http.get(f"/sessions/{session}").status_code == 200


def test_an_absent_turn_is_not_found(server: Served) -> None:
    session = server.create()
    for path in ("turns/t_99", "turns/t_99/events", "turns/%00"):
        answer = server.http.get(f"/sessions/{session}/{path}")
        assert error_of(answer) == (404, "turn_not_found")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"\xff", b'{"system": 5}', b'{"unknown": 1}', b'{"ttl_ms": NaN}']
)
def test_a_bad_body_is_refused_with_the_place(server: Served, body: bytes) -> None:
    answer = server.http.post("/sessions", content=body)
    assert error_of(answer) == (400, "invalid_request")


def test_metrics_count_turns_tokens_and_errors(server: Served) -> None:
    session = server.create()
    server.turn(session)
    server.http.get("/sessions/absent")
    server.http.get("/absent")
    assert server.http.delete("/sessions").headers["allow"] == "GET, HEAD, POST"
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    values = dict(
        line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")
    )
    numbers = {name: float(value) for name, value in values.items()}
    assert numbers['agentserve_errors_total{code="session_not_found"}'] >= 1
    assert numbers['agentserve_errors_total{code="route_not_found"}'] >= 1
    assert numbers['agentserve_tokens_total{kind="prefill"}'] > 0
    assert numbers['agentserve_tokens_total{kind="decode"}'] > 0
    assert numbers['agentserve_sessions{state="idle"}'] >= 1
    assert numbers["agentserve_ttft_seconds_count"] >= 1
    assert numbers["agentserve_turn_seconds_count"] >= 1
    assert numbers['agentserve_blocks{state="free"}'] > 0
    assert numbers["agentserve_heartbeat_age_seconds"] >= 0
    assert sum(value for name, value in numbers.items() if "turns_total" in name) >= 1


def test_every_shape_on_the_wire_decodes_with_its_struct(server: Served) -> None:
    session = server.create()
    turn = server.turn(session)
    assert wire.decode(json.dumps(turn).encode(), wire.Turn).id == turn["id"]
    listing = server.http.get("/sessions").content
    assert wire.decode(listing, wire.SessionList).sessions
