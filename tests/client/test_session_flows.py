"""What a session sends, and what it does when it is interrupted."""

import asyncio

import pytest
from agentserve_tools import ToolOutput
from client_flows import (
    CONTEXT,
    Script,
    api,
    frames,
    ok,
    opened,
    refused,
    session,
    session_info,
    turn,
)

from agentserve import errors, system, tool, user, wire
from agentserve.client import core
from agentserve.client.models import Turn
from agentserve.client.session import Opening, open_session
from agentserve.client.tools import Tools

INTERRUPTS = [KeyboardInterrupt, asyncio.CancelledError]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(read_only=True)
def look(where: str) -> str:
    return where


def call_item(name: str, arguments: dict, number: int = 1) -> wire.ToolCallOut:
    return wire.ToolCallOut(f"i_{number}", f"call_{number}", name, arguments)


BROKEN = wire.MalformedToolCallOut("i_9", "call_9", "{oops", "not JSON")


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


# Streams


DELTAS = [wire.TextDelta(0, f"part {n}") for n in range(4)]


def read_all(script, s, options=None):
    stream = script.drive(s.open_stream("x", options or {}))
    events = []
    while (event := script.drive(stream.next_event())) is not None:
        events.append(event)
    return stream, events


def test_a_stream_yields_events_and_then_the_turn():
    s = session()
    done = wire.TurnDone(turn(1))
    script = Script(opened(), frames(*DELTAS, done))
    stream, events = read_all(script, s)
    assert events == [*DELTAS, done]
    assert stream.turn.id == s.head == "t_1"
    assert script.bodies()[0]["stream"] is True
    assert script.effects[-1] == core.Close("stream")


@pytest.mark.parametrize("lost", [b"", ConnectionError()])
def test_a_lost_stream_goes_on_after_the_last_whole_event(lost):
    done = wire.TurnDone(turn(1))
    half = frames(DELTAS[2], first=3)[:-5]
    script = Script(
        opened(), frames(*DELTAS[:2]) + half, lost, opened(), frames(*DELTAS[2:], done, first=3)
    )
    _, events = read_all(script, session())
    assert events == [*DELTAS, done]
    first, second = script.sent
    assert second.headers["last-event-id"] == "2"
    assert (first.path, first.body) == (second.path, second.body)
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_a_stream_that_brings_nothing_again_and_again_is_given_up():
    script = Script(*[opened(), b""] * 8)
    with pytest.raises(ConnectionError, match="cannot be taken up again"):
        read_all(script, session())


def test_an_error_event_is_raised_as_its_class():
    body = wire.ErrorBody("context_full", "no room", False)
    script = Script(opened(), frames(wire.ErrorEvent(body)))
    s = session()
    stream = script.drive(s.open_stream("x", {}))
    with pytest.raises(errors.ContextFull, match="no room"):
        script.drive(stream.next_event())
    script.drive(s.end_stream(stream, {}))
    assert len(script.sent) == 1


def test_events_of_a_newer_server_are_passed_over():
    done = wire.TurnDone(turn(1))
    new = b'data: {"type":"turn.sparkled","colour":"blue"}\n\n'
    _, events = read_all(Script(opened(), new + frames(done)), session())
    assert events == [done]


def test_leaving_a_stream_early_cancels_its_turn_by_id():
    s = session()
    script = Script(opened(turn_id="t_3"), frames(*DELTAS), ok(turn(3, status="cancelled")))
    stream = script.drive(s.open_stream("x", {}))
    script.drive(stream.next_event())
    script.drive(s.end_stream(stream, {}))
    assert script.bodies()[1] == {"turn": "t_3", "keep": "none"}
    script.drive(s.end_stream(stream, {}))
    assert len(script.sent) == 2


def test_a_refused_stream_cancels_nothing():
    script = Script(refused(409, "session_busy"))
    with pytest.raises(errors.SessionBusy):
        script.drive(session().open_stream("x", {}))
    assert len(script.sent) == 1


# The tool loop


def started(effect):
    assert isinstance(effect, core.StartTool)
    return effect.call.args


def test_run_answers_calls_until_there_are_none():
    call = call_item("add", {"a": 1, "b": 2})
    script = Script(
        opened(),
        frames(wire.TurnDone(turn(1, output=[call], stop_reason="tool_calls"))),
        started,
        lambda effect: [ToolOutput(3, duration_ms=7) for _ in effect.handles],
        opened(),
        frames(wire.TurnDone(turn(2, output=[wire.TextOut("i", "three")]))),
    )
    last = script.drive(session(add).run("add 1 and 2", 5, None, {}))
    assert last.text == "three"
    assert script.bodies()[1]["input"] == [
        {
            "type": "tool_result",
            "call_id": "call_1",
            "output": 3,
            "status": "ok",
            "reason": None,
            "duration_ms": 7,
        }
    ]


def test_read_only_tools_start_before_the_turn_has_ended_and_others_after():
    items = [call_item("add", {"a": 1, "b": 2}), call_item("look", {"where": "x"}, 2)]
    script = Script(
        opened(),
        frames(wire.ItemDone(0, items[0]), wire.ItemDone(1, items[1])),
        started,
        frames(wire.TurnDone(turn(1, output=items)), first=3),
        started,
        lambda effect: [ToolOutput(str(handle)) for handle in effect.handles],
        opened(),
        frames(wire.TurnDone(turn(2))),
    )
    script.drive(session(add, look).run("x", 5, None, {}))
    kinds = [type(effect).__name__ for effect in script.effects[:6]]
    assert kinds == ["Send", "Read", "StartTool", "Read", "Close", "StartTool"]
    results = script.bodies()[1]["input"]
    assert [r["call_id"] for r in results] == ["call_1", "call_2"]
    assert results[1]["output"] == str(("look", {"where": "x"}))


def test_run_answers_unreadable_calls_by_itself():
    script = Script(
        opened(),
        frames(wire.TurnDone(turn(1, output=[BROKEN]))),
        [],
        opened(),
        frames(wire.TurnDone(turn(2))),
    )
    assert script.drive(session(add).run("x", 5, None, {})).id == "t_2"
    assert script.bodies()[1]["input"][0]["output"] == "not JSON"


@pytest.mark.parametrize(("name", "max_turns"), [("elsewhere", 5), ("add", 1)])
def test_run_returns_calls_that_it_cannot_or_may_not_answer(name, max_turns):
    call = call_item(name, {"a": 1, "b": 1})
    script = Script(opened(), frames(wire.TurnDone(turn(1, output=[call]))))
    last = script.drive(session(add).run("x", max_turns, None, {}))
    assert last.tool_calls[0].name == name


def test_an_interrupted_run_stops_its_tools_and_cancels_the_turn():
    item = call_item("look", {"where": "x"})
    script = Script(
        opened(),
        frames(wire.ItemDone(0, item)),
        "handle",
        KeyboardInterrupt(),
        ok(turn(1, status="cancelled")),
    )
    with pytest.raises(KeyboardInterrupt):
        script.drive(session(look).run("x", 5, None, {}))
    assert core.StopTools(["handle"]) in script.effects
    assert script.sent[-1].path == "/sessions/s/cancel"


def test_an_interrupt_while_tools_run_stops_them_all():
    calls = [call_item("add", {"a": 1, "b": n}, n) for n in (1, 2)]
    script = Script(
        opened(),
        frames(wire.TurnDone(turn(1, output=calls))),
        "first",
        "second",
        KeyboardInterrupt(),
    )
    with pytest.raises(KeyboardInterrupt):
        script.drive(session(add).run("x", 5, None, {}))
    assert script.effects[-1] == core.StopTools(["first", "second"])


def test_a_callback_sees_every_event_and_its_exception_ends_the_turn():
    done = wire.TurnDone(turn(1))
    seen = []
    script = Script(
        opened(),
        frames(DELTAS[0], done),
        lambda effect: effect.callback(effect.event),
        lambda effect: effect.callback(effect.event),
    )
    script.drive(session().run("x", 5, seen.append, {}))
    assert seen == [DELTAS[0], done]

    script = Script(opened(), frames(DELTAS[0]), ZeroDivisionError(), ok(turn(1)))
    with pytest.raises(ZeroDivisionError):
        script.drive(session().run("x", 5, seen.append, {}))
    assert script.sent[-1].path == "/sessions/s/cancel"


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
