"""What a turn becomes: the time it waited, and the line that says what the model did."""

from agentserve import wire
from agentserve.replay.runner import action_line, waited_ms
from agentserve.wire import Timing


def turn(*output: wire.OutputItem, stop_reason: str = "end") -> wire.Turn:
    return wire.Turn(
        id="t",
        session="s",
        previous=None,
        status="completed",
        context=wire.Context(used=0, limit=0, left=0),
        stop_reason=stop_reason,
        output=list(output),
        usage=wire.Usage(output_tokens=64),
    )


def test_a_step_of_others_before_the_prefill_is_waiting_and_not_the_servers_own_time():
    timing = Timing(queue=0, prefill=671, decode=1284, ttft=2925, total=4209)
    assert waited_ms(timing) == 2254
    assert waited_ms(Timing(queue=40, restore=5, prefill=10, decode=20, ttft=56, total=76)) == 41


def test_a_turn_without_a_first_token_waited_as_long_as_the_engine_says():
    assert waited_ms(Timing(queue=7, prefill=30, total=40)) == 7
    assert waited_ms(Timing(queue=7, prefill=30, ttft=36, total=40)) == 7


def test_a_turn_is_shown_by_its_calls_or_else_by_its_text():
    call = wire.ToolCallOut(id="i", call_id="c", name="read", arguments={"path": "a.py", "line": 3})
    text = wire.TextOut(id="i", text="All  is\nwell.")
    assert action_line(turn(text, call, call)) == 'read("a.py", 3), read("a.py", 3)'
    assert action_line(turn(text)) == "All is well."


def test_a_turn_that_was_cut_says_where_and_shows_what_there_is_of_its_call():
    raw = '{"name": "run", "arguments": {"check": "add'
    call = wire.MalformedToolCallOut(id="i", call_id="c", raw=raw, error="truncated")
    assert action_line(turn(call, stop_reason="max_tokens")) == (
        f"unfinished call {raw} (cut at 64 tokens)"
    )
    call = wire.MalformedToolCallOut(id="i", call_id="c", raw='{"name"]', error="syntax")
    assert action_line(turn(call)) == 'unreadable call {"name"]'
