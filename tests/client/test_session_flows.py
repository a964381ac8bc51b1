"""What a session sends: when it is opened, for each step, and when its history is edited."""

import asyncio

import pytest
from client_flows import (
    BROKEN,
    CONTEXT,
    Script,
    add,
    api,
    call_item,
    ok,
    refused,
    session,
    session_info,
    turn,
)

from agentserve import errors, system, user, wire
from agentserve.client import core
from agentserve.client.models import Turn
from agentserve.client.session import Opening, open_session
from agentserve.client.tools import Tools

INTERRUPTS = [KeyboardInterrupt, asyncio.CancelledError]


# Opening


def test_creating_sends_id_tools_and_options():
    script = Script(ok(session_info()))
    opening = Opening("run-7", False, Tools([add]), {"system": "Be brief."})
    script.drive(open_session(api(), opening))
    (body,) = script.bodies()
    assert (body["id"], body["system"]) == ("run-7", "Be brief.")
    assert body["tools"][0]["name"] == "add"
    assert body["tools"][0]["type"] == "function"


def test_resuming_takes_up_an_existing_session_without_creating():
    script = Script(ok(session_info("t_4")))
    found = script.drive(open_session(api(), Opening("run/7", True, Tools(), {})))
    assert found.head == "t_4"
    assert [(s.method, s.path) for s in script.sent] == [("GET", "/sessions/run%2F7")]


def test_resuming_creates_what_is_not_there():
    script = Script(refused(404, "session_not_found"), ok(session_info()))
    script.drive(open_session(api(), Opening("run-7", True, Tools(), {})))
    assert [s.method for s in script.sent] == ["GET", "POST"]


def test_resuming_needs_an_id():
    with pytest.raises(ValueError, match="id is needed"):
        Script().drive(open_session(api(), Opening(None, True, Tools(), {})))


# Steps


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("hi", "hi"),
        (None, []),
        (user("hi"), [{"type": "user", "content": "hi"}]),
        ({"type": "user", "content": "hi"}, [{"type": "user", "content": "hi"}]),
        (
            [system("s"), user("u")],
            [{"type": "system", "content": "s"}, {"type": "user", "content": "u"}],
        ),
    ],
)
def test_input_is_text_an_item_items_or_nothing(given, sent):
    script = Script(ok(turn()))
    script.drive(session().step(given, {}))
    assert script.bodies()[0]["input"] == sent


def test_the_head_is_always_expected_and_follows_the_turns():
    s = session()
    script = Script(ok(turn(1)), ok(turn(2)), ok(turn(3)))
    for _ in range(3):
        script.drive(s.step("x", {}))
    assert [body["expect_head"] for body in script.bodies()] == [None, "t_1", "t_2"]
    assert s.head == "t_3"


def test_results_answer_their_calls_and_output_keeps_its_type():
    made = Turn(turn(output=[call_item("add", {"a": 1, "b": 2})]))
    (call,) = made.tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    script = Script(ok(turn()))
    script.drive(session().step([call.result({"sum": 3}, duration_ms=5)], {}))
    (sent,) = script.bodies()[0]["input"]
    assert sent["call_id"] == "call_1"
    assert (sent["output"], sent["duration_ms"], sent["status"]) == ({"sum": 3}, 5, "ok")


def test_unreadable_calls_are_answered_beside_the_results():
    s = session()
    readable = call_item("add", {"a": 1, "b": 1})
    script = Script(ok(turn(1, output=[readable, BROKEN], stop_reason="tool_calls")), ok(turn(2)))
    made = script.drive(s.step("x", {}))
    script.drive(s.step([c.result(2) for c in made.tool_calls], {}))
    assert [(r["call_id"], r["status"]) for r in script.bodies()[1]["input"]] == [
        ("call_1", "ok"),
        ("call_9", "error"),
    ]


def test_an_own_answer_to_an_unreadable_call_is_kept_and_user_text_adds_none():
    s = session()
    script = Script(ok(turn(1, output=[BROKEN])), ok(turn(2)))
    script.drive(s.step("x", {}))
    own = {"type": "tool_result", "call_id": "call_9", "output": "mine"}
    script.drive(s.step([own], {}))
    assert script.bodies()[1]["input"] == [own]

    s = session()
    script = Script(ok(turn(1, output=[BROKEN])), refused(409, "tool_results_missing"))
    script.drive(s.step("x", {}))
    with pytest.raises(errors.ToolResultsMissing):
        script.drive(s.step("never mind", {}))
    assert script.bodies()[1]["input"] == "never mind"


def test_a_failed_turn_raises_its_error_and_leaves_the_head():
    failed = turn(5, status="failed", error=wire.ErrorBody("engine_down", "gone", True))
    s = session(head="t_4")
    with pytest.raises(errors.EngineDown, match="gone"):
        Script(ok(failed)).drive(s.step("x", {}))
    assert s.head == "t_4"


def test_after_a_cancelled_turn_the_head_is_asked_for():
    s = session(head="t_4")
    script = Script(ok(turn(5, status="cancelled")), ok(session_info("t_5")), ok(turn(6)))
    script.drive(s.step("x", {}))
    script.drive(s.step("y", {}))
    assert [send.method for send in script.sent] == ["POST", "GET", "POST"]
    assert script.bodies()[2]["expect_head"] == "t_5"


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_an_interrupted_step_is_cancelled(interrupt):
    script = Script(interrupt(), ok(turn(1, status="cancelled")))
    with pytest.raises(interrupt):
        script.drive(session().step("x", {}))
    assert script.sent[1].path == "/sessions/s/cancel"


@pytest.mark.parametrize("options", [{"on_disconnect": "continue"}, {"when_busy": "queue"}])
def test_a_turn_that_shall_continue_or_may_be_queued_is_not_cancelled(options):
    script = Script(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        script.drive(session().step("x", options))
    assert len(script.sent) == 1


@pytest.mark.parametrize("answer", [refused(409, "session_busy"), ConnectionError()])
def test_a_cancel_that_fails_does_not_hide_the_interrupt(answer):
    script = Script(KeyboardInterrupt(), *[answer] * 8)
    with pytest.raises(KeyboardInterrupt):
        script.drive(session().step("x", {}))


# Edits


HEAD = {"head": "t_2", "kept_tokens": 1, "new_tokens": 0, "recomputed": []}


def test_rewriting_refers_to_turns_and_moves_the_head():
    s = session(head="t_9")
    script = Script(ok(HEAD), ok(turn(3)))
    script.drive(s.rewrite([user("Summary: ..."), Turn(turn(8)), Turn(turn(9))], False))
    assert script.sent[0].method == "PUT"
    assert script.bodies()[0] == {
        "items": [
            {"type": "user", "content": "Summary: ..."},
            {"ref": "t_8"},
            {"ref": "t_9"},
        ],
        "expect_head": "t_9",
        "prefill": False,
    }
    script.drive(s.step("x", {}))
    assert script.bodies()[1]["expect_head"] == "t_2"


def test_rolling_back_takes_a_turn_or_its_id():
    s = session(head="t_9")
    script = Script(ok(HEAD), ok(HEAD))
    script.drive(s.rollback(None, Turn(turn(3))))
    script.drive(s.rollback("t_2", None))
    assert script.bodies() == [
        {"before": "t_3", "expect_head": "t_9"},
        {"to": "t_2", "expect_head": "t_2"},
    ]


def test_forks_share_the_tools_and_start_at_their_own_head():
    s = session(add, head="t_1")
    script = Script(ok({"sessions": [session_info("t_1"), session_info("t_1")]}))
    forks = script.drive(s.fork(2, Turn(turn(1)), {}))
    assert script.bodies() == [{"n": 2, "at": "t_1"}]
    assert [fork.head for fork in forks] == ["t_1", "t_1"]
    assert all(fork.tools is s.tools for fork in forks)


def test_deleting_what_is_gone_is_no_error():
    script = Script(refused(404, "session_not_found"), core.Reply(204, {}))
    s = session()
    script.drive(s.delete(keep_transcript=False))
    script.drive(s.delete(keep_transcript=True))
    assert [send.path for send in script.sent] == ["/sessions/s", "/sessions/s?keep=transcript"]


def test_counting_returns_what_is_left():
    answer = {
        "input_tokens": 12,
        "new_tokens": 2,
        "context": {"used": 10, "limit": 100, "left": 90},
    }
    assert Script(ok(answer)).drive(session().count("hi")).context == CONTEXT
