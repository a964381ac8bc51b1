"""Streams of a turn and the tool loop on them, also when they are interrupted or lost."""

import pytest
from agentserve_tools import ToolOutput
from client_flows import (
    BROKEN,
    Script,
    add,
    call_item,
    frames,
    ok,
    opened,
    refused,
    session,
    session_info,
    turn,
)

from agentserve import errors, tool, wire
from agentserve.client import core
from agentserve.client.loop import ToolLoop


@tool(read_only=True)
def look(where: str) -> str:
    return where


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


def loop(*tools, on_event=None):
    return ToolLoop(session(*tools), {}, on_event)


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
    last = script.drive(loop(add).run("add 1 and 2", 5))
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
    script.drive(loop(add, look).run("x", 5))
    kinds = [type(effect).__name__ for effect in script.effects[:6]]
    assert kinds == ["Send", "Read", "StartTool", "Read", "Close", "StartTool"]
    results = script.bodies()[1]["input"]
    assert [r["call_id"] for r in results] == ["call_1", "call_2"]
    assert results[1]["output"] == str(("look", {"where": "x"}))


def test_run_answers_unreadable_calls_by_itself():
    script = Script(
        opened(),
        frames(wire.TurnDone(turn(1, output=[BROKEN]))),
        opened(),
        frames(wire.TurnDone(turn(2))),
    )
    assert script.drive(loop(add).run("x", 5)).id == "t_2"
    assert script.bodies()[1]["input"][0]["output"] == "not JSON"


@pytest.mark.parametrize(("name", "max_turns"), [("elsewhere", 5), ("add", 1)])
def test_run_returns_calls_that_it_cannot_or_may_not_answer(name, max_turns):
    call = call_item(name, {"a": 1, "b": 1})
    script = Script(opened(), frames(wire.TurnDone(turn(1, output=[call]))))
    last = script.drive(loop(add).run("x", max_turns))
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
        script.drive(loop(look).run("x", 5))
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
        script.drive(loop(add).run("x", 5))
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
    script.drive(loop(on_event=seen.append).run("x", 5))
    assert seen == [DELTAS[0], done]

    script = Script(opened(), frames(DELTAS[0]), ZeroDivisionError(), ok(turn(1)))
    with pytest.raises(ZeroDivisionError):
        script.drive(loop(on_event=seen.append).run("x", 5))
    assert script.sent[-1].path == "/sessions/s/cancel"


def opened_turn(number, *output):
    return [opened(), frames(wire.TurnDone(turn(number, output=list(output))))]


def test_what_has_a_result_is_staged_while_others_run_and_the_rest_is_the_next_input():
    items = [call_item("add", {"a": 1, "b": n}, n) for n in (1, 2, 3)]
    script = Script(
        *opened_turn(1, *items),
        *["first", "second", "third"],
        lambda effect: [None, ToolOutput("two"), None],
        ok({"pending_calls": [], "staged": ["call_2"], "prefilled_tokens": 0}),
        lambda effect: [ToolOutput(effect.handles[0]), ToolOutput(effect.handles[1])],
        *opened_turn(2),
    )
    script.drive(loop(add).run("x", 5))
    _, staged, then = script.bodies()
    assert script.sent[1].path == "/sessions/s/tool_results"
    assert [(r["call_id"], r["output"]) for r in staged["results"]] == [("call_2", "two")]
    assert [(r["call_id"], r["output"]) for r in then["input"]] == [
        ("call_1", "first"),
        ("call_3", "third"),
    ]


def test_calls_are_told_when_they_begin_and_when_they_have_ended():
    call = call_item("add", {"a": 1, "b": 2})
    told = []

    def tell(effect):
        assert isinstance(effect, core.Notify)
        effect.callback(effect.event)

    script = Script(
        *opened_turn(1, call),
        tell,
        tell,
        "handle",
        lambda effect: [ToolOutput(3)],
        tell,
        *opened_turn(2),
        tell,
    )
    script.drive(loop(add, on_event=told.append).run("x", 5))
    _, begun, ended, _ = told
    assert (begun.call.name, ended.call, ended.output) == ("add", begun.call, ToolOutput(3))


def test_nothing_is_begun_in_a_turn_that_is_the_last():
    item = call_item("look", {"where": "x"})
    script = Script(opened(), frames(wire.ItemDone(0, item), wire.TurnDone(turn(1, output=[item]))))
    assert script.drive(loop(look).run("x", 1)).tool_calls
    assert not any(isinstance(effect, core.StartTool) for effect in script.effects)


def test_without_a_prompt_what_waits_is_answered_first():
    items = [call_item("add", {"a": 1, "b": 1}), call_item("add", {"a": 2, "b": 2}, 2)]
    info = session_info("t_4")
    info.pending_calls[:] = [
        wire.PendingCall("call_2", "add", 0),
        wire.PendingCall("call_9", "", 0),
    ]
    script = Script(
        ok(info),
        ok(turn(4, output=[*items, BROKEN])),
        "handle",
        lambda effect: [ToolOutput(4)],
        *opened_turn(5),
    )
    script.drive(loop(add).run(None, 5))
    assert [send.path for send in script.sent[:2]] == ["/sessions/s", "/sessions/s/turns/t_4"]
    assert [(r["call_id"], r["status"]) for r in script.bodies()[2]["input"]] == [
        ("call_2", "ok"),
        ("call_9", "error"),
    ]


def test_a_run_of_no_turns_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Script().drive(loop().run("x", 0))
