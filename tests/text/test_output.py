import json

import msgspec
import pytest
import text_models
from hypothesis import given, settings
from hypothesis import strategies as st
from pushed import GREP, LS, feed, open_stream

from agentserve import wire
from agentserve.sessions import scan
from agentserve.sessions.emitter import MOST_CALLS
from agentserve.sessions.toolformat import DEEPSEEK, HERMES, JSON


def plain(items):
    """Return items without their ids."""
    rows = [msgspec.to_builtins(item) for item in items]
    return [{k: v for k, v in row.items() if k not in ("id", "call_id")} for row in rows]


def text_item(text):
    return {"type": "text", "text": text}


def call_item(name, arguments, **more):
    return {"type": "tool_call", "name": name, "arguments": arguments, **more}


def test_plain_text_is_one_item_with_its_white_space():
    stream, events, ids = feed(JSON, "hello\n  world \n")
    assert plain(stream.items) == [text_item("hello\n  world \n")]
    assert (stream.kept, stream.tail, stream.body_start) == (len(ids), "", 0)
    assert [type(event) for event in events][:2] == [wire.ItemStarted, wire.TextDelta]
    assert isinstance(events[-1], wire.ItemDone)


def test_json_calls_among_text_keep_the_text_before_and_after():
    stream, _, _ = feed(JSON, f"Let me look.\n{GREP}\n\n{LS}\nThat was it.")
    assert plain(stream.items) == [
        text_item("Let me look."),
        call_item("grep", {"pattern": "a b", "limit": 3}),
        call_item("ls", {}),
        text_item("That was it."),
    ]


def test_hermes_calls_with_reasoning():
    tagged = [f"<tool_call>\n{call}\n</tool_call>" for call in (GREP, LS)]
    text = "\n".join(["<think>\nhm\n</think>\n", "So:", *tagged])
    stream, _, ids = feed(HERMES, text)
    assert plain(stream.items) == [
        {"type": "reasoning", "text": "hm"},
        text_item("So:"),
        call_item("grep", {"pattern": "a b", "limit": 3}),
        call_item("ls", {}),
    ]
    tokenizer = text_models.tokenizer("qwen3")
    assert tokenizer.decode(ids[stream.body_start :]).startswith("So:")
    assert 0 < stream.reasoning_tokens <= stream.body_start


def test_a_call_is_done_as_soon_as_its_arguments_close():
    stream = open_stream(JSON, "smollm2")
    events = stream.push(text_models.tokenizer("smollm2").encode_text(GREP))
    assert isinstance(events[-1], wire.ItemDone)
    assert events[0].item == wire.ToolCallOut("item_0", "call_0", "grep", {})
    assert stream.items[0].call_id == "call_0"


# Shapes of real parser failures in other servers; see the families' bug trackers.
CASES = [
    (
        HERMES,
        '<tool_call>\n{"name": "grep", "arguments": {"pattern": "x", "limit": 7}}\n</tool_call>',
    ),
    (HERMES, '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'),
    (
        HERMES,
        '<tool_call>\n{"name": "grep", "arguments": {"pattern": "mkdir -p t/{a,b"}}\n</tool_call>',
    ),
    (
        HERMES,
        '<tool_call>\n{"name": "grep", "arguments": '
        '{"pattern": "x", "paths": [{"p": "\\"日本\\""}, [1]]}}\n</tool_call>',
    ),
    (HERMES, f"before<tool_call>\n{LS}\n</tool_call>after"),
    (HERMES, f"<tool_call>\n{LS}\n</tool_call>\n<tool_call>\n{GREP}\n</tool_call>"),
    (HERMES, "To call a tool write <tool_call> and then JSON."),
    (
        HERMES,
        '<tool_call>\n{"name": "grep", "arguments": {"pattern": "</tool_call>"}}\n</tool_call>',
    ),
    (HERMES, '<tool_call>\n{"name": "grep", "arguments": {"pattern": "x'),
    (HERMES, '<tool_call>\n{"name": "grep", "arguments": {"pattern": "x"}\n</tool_call> ok'),
    (HERMES, '<tool_call>\n{"arguments": {"pattern": "x"}, "name": "grep"}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "nope", "arguments": {"a": 1}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "ls", "arguments": "{}"}\n</tool_call>'),
    (HERMES, "<tool_call>\n[1, 2]\n</tool_call>"),
    (HERMES, "<think>never closed <tool_call>\n" + LS),
    (HERMES, "<think>\n\n</think>\n\nplain"),
    (HERMES, "text with <think>not reasoning</think>"),
    (HERMES, "</think></tool_call>{}<tool_call><tool_call>"),
    (HERMES, f"<tool_call>\n{LS}\n</tool_"),
    (JSON, f"{LS}{GREP}"),
    (JSON, '{"name": "grep", "arguments": {"pattern": "a\\"}{b\\\\"}}\ntext'),
    (JSON, '{"name": "grep", "arguments": {"pattern": "line\nbreak"}}\nnext'),
    (JSON, '{"name": "grep", "arguments": {"pattern": \'x\'}}\nnext'),
    (JSON, '{"name": "grep", "arguments": {"pattern": "x"}, "id": 3}'),
    (JSON, '{"name": "grep"}'),
    (JSON, '{"name": "grep", "arguments": null}'),
    (JSON, '{"name": "grep", "arguments": {"limit": NaN}}'),
    (JSON, '{"name": "grep", "arguments": {"pattern": "\\ud800"}}'),
    (JSON, '{"name": "bob", "age": 3} and {"x": [1, {"y": "}"}]} {'),
    (JSON, 'say {"name": "nope", "arguments": {}} in prose'),
    (JSON, '{"name": "gr'),
    (JSON, '{ "name" : "ls" , "parameters" : { } } '),
    (JSON, "{" * 50 + '"name": ' + "}" * 50),
    (JSON, '{"name": ' + " " * 600 + '"grep", "arguments": {}}'),
    (JSON, 'émoji 😀 {"name": "grep", "arguments": {"pattern": "😀é"}}'),
]


@pytest.mark.parametrize(("format", "text"), CASES)
def test_streamed_equals_unstreamed_at_every_split(format, text):
    whole, _, ids = feed(format, text, step=10**6)
    for step in (1, 2, 3, 7):
        stream, events, _ = feed(format, text, step=step)
        assert stream.items == whole.items
        assert (stream.kept, stream.tail, stream.body_start) == (len(ids), "", whole.body_start)
        check_events(events, stream.items)


def check_events(events, items):
    """The events tell the items: each starts, grows by its deltas, and is done, in order."""
    done = []
    for event in events:
        assert event.index == len(done)
        if isinstance(event, wire.ItemStarted):
            grown = ""
        elif isinstance(event, wire.ItemDone):
            if isinstance(event.item, wire.TextOut | wire.ReasoningOut):
                assert event.item.text == grown
            elif isinstance(event.item, wire.ToolCallOut):
                assert json.loads(grown) == event.item.arguments
            done.append(event.item)
        else:
            grown += event.delta
    assert done == items


def test_what_the_real_failures_give():
    results = {text: plain(feed(format, text)[0].items) for format, text in CASES}
    kinds = {text: [item["type"] for item in items] for text, items in results.items()}
    assert results[CASES[0][1]] == [call_item("grep", {"pattern": "x", "limit": 7})]
    assert results[CASES[4][1]] == [text_item("before"), call_item("ls", {}), text_item("after")]
    assert results[CASES[6][1]] == [text_item(CASES[6][1])]
    assert results[CASES[7][1]] == [call_item("grep", {"pattern": "</tool_call>"})]
    assert kinds[CASES[8][1]] == ["malformed_tool_call"]
    assert kinds[CASES[9][1]] == ["malformed_tool_call", "text"]
    assert results[CASES[10][1]] == [call_item("grep", {"pattern": "x"})]
    assert results[CASES[11][1]] == [
        call_item("nope", {"a": 1}, schema_errors=["there is no tool 'nope'"])
    ]
    assert kinds[CASES[12][1]] == ["malformed_tool_call"]
    assert kinds[CASES[14][1]] == ["reasoning", "tool_call"]
    assert results[CASES[15][1]] == [text_item("plain")]
    assert kinds[CASES[16][1]] == ["text"]
    assert kinds[CASES[19][1]] == ["tool_call", "tool_call"]
    assert kinds[CASES[21][1]] == ["malformed_tool_call", "text"]
    for case in (23, 24, 25, 26, 27):
        assert kinds[CASES[case][1]] == ["malformed_tool_call"]
    assert results[CASES[28][1]] == [text_item(CASES[28][1])]
    assert results[CASES[29][1]] == [text_item(CASES[29][1])]
    assert results[CASES[31][1]] == [call_item("ls", {})]


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", "{", "}", "[", '"']
PIECES += ['"name": "grep"', '{"name": "grep", "arguments": ', '{"pattern": "x"}', "\\", ", "]
PIECES += [GREP, LS, "text", "é😀"]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), format=st.sampled_from([JSON, HERMES]))
def test_anything_streams_as_it_is_read_whole(data, format):
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    stops = tuple(
        data.draw(st.lists(st.sampled_from(["ex", "text", "}\n", "\n\n", "é"]), max_size=2))
    )
    parallel = data.draw(st.booleans())
    reason = data.draw(st.sampled_from(["stop", "length", "cancelled"]))
    options = {"stop": stops, "parallel": parallel, "reason": reason}
    whole, _, ids = feed(format, text, step=10**6, name="smollm2", **options)
    stream, events, _ = feed(
        format, text, step=data.draw(st.integers(1, 4)), name="smollm2", **options
    )
    assert stream.items == whole.items
    assert (stream.kept, stream.tail) == (whole.kept, whole.tail)
    if reason != "cancelled":
        check_events(events, stream.items)
    decode = text_models.tokenizer("smollm2").decode
    assert text.startswith(decode(ids[: stream.kept]) + stream.tail)


def test_arguments_that_break_the_schema_are_a_call_with_the_reasons():
    stream, _, _ = feed(JSON, '{"name": "grep", "arguments": {"limit": "x"}}')
    (item,) = stream.items
    assert isinstance(item, wire.ToolCallOut)
    assert len(item.schema_errors) == 2
    assert any(error.startswith("limit: ") for error in item.schema_errors)


def test_a_call_cut_by_length_is_malformed_and_can_be_answered():
    for text in ('{"name": "grep", "arguments": {"pat', '{"name": "grep", "arg', f"{GREP[:-1]}"):
        stream, _, _ = feed(JSON, text, reason="length")
        (item,) = stream.items
        assert (item.call_id, item.name, item.raw) == ("call_0", "grep", text)
        assert item.error == "truncated"


def test_a_cancelled_turn_drops_the_open_call_and_open_reasoning():
    stream, _, ids = feed(JSON, 'Look:\n{"name": "grep", "arguments": {"pat', reason="cancelled")
    assert plain(stream.items) == [text_item("Look:")]
    decode = text_models.tokenizer("smollm2").decode
    assert decode(ids[: stream.kept]) + stream.tail == "Look:\n"
    stream, _, _ = feed(HERMES, "<think>\nhm", reason="cancelled")
    assert (stream.items, stream.kept, stream.tail) == ([], 0, "")


def test_a_stop_string_is_found_across_tokens_and_splits_one():
    stream, events, ids = feed(JSON, "alpha beta STOPPED gamma", stop=("a STOP", "zzz"))
    assert stream.stopped == "stop_sequence"
    assert plain(stream.items) == [text_item("alpha bet")]
    decode = text_models.tokenizer("smollm2").decode
    assert decode(ids[: stream.kept]) + stream.tail == "alpha bet"
    assert stream.tail != ""
    assert "STOP" not in "".join(e.delta for e in events if isinstance(e, wire.TextDelta))


def test_the_beginning_of_a_stop_string_that_does_not_come_is_given_back():
    stream, _, _ = feed(JSON, "one two STO", stop=("STOP",))
    assert stream.stopped is None
    assert plain(stream.items) == [text_item("one two STO")]


def test_without_parallel_calls_generation_stops_after_the_first():
    stream, _, ids = feed(JSON, f"{GREP}\n{LS}", parallel=False)
    assert stream.stopped == "tool_calls"
    assert len(stream.items) == 1
    assert text_models.tokenizer("smollm2").decode(ids[: stream.kept]) + stream.tail == GREP
    tagged = f"<tool_call>\n{GREP}\n</tool_call>"
    stream, _, ids = feed(HERMES, f"{tagged}\n<tool_call>\n{LS}", parallel=False)
    decode = text_models.tokenizer("qwen3").decode
    assert decode(ids[: stream.kept]).rstrip() + stream.tail == tagged


def test_generation_stops_after_the_most_calls_that_a_message_may_have():
    stream, _, _ = feed(JSON, "\n".join([LS] * (MOST_CALLS + 9)))
    assert stream.stopped == "tool_calls"
    assert [item.name for item in stream.items] == ["ls"] * MOST_CALLS


def test_what_follows_more_signs_than_a_message_has_is_text(monkeypatch):
    monkeypatch.setattr(scan, "MOST_SIGNS", 20)
    call = DEEPSEEK.form.write([("ls", {})])
    sign, noise = call[: call.index(">") + 1], "a < b "
    for nothing, called in ((3, True), (30, False)):
        text = f"{sign} {noise}" * nothing + call
        streams = [feed(DEEPSEEK, text, step=step)[0].items for step in (1, 7, 9999)]
        assert plain(streams[0]) == plain(streams[1]) == plain(streams[2])
        assert any(isinstance(item, wire.ToolCallOut) for item in streams[0]) == called


def test_without_tools_a_call_is_text():
    stream, _, _ = feed(JSON, GREP, tools_on=False)
    assert plain(stream.items) == [text_item(GREP)]


def test_reasoning_that_the_prompt_opened_needs_no_opening_tag():
    stream, _, _ = feed(HERMES, "hm\n</think>\n\nyes", in_reasoning=True)
    assert plain(stream.items) == [{"type": "reasoning", "text": "hm"}, text_item("yes")]


@pytest.mark.parametrize("unit", ["{", "<tool_call>", '{"name": ', " \n", "<think>", '"', "}"])
def test_long_adversarial_text_stays_text(unit):
    text = "a" + unit * 4000
    for format in (JSON, HERMES):
        shown = []
        for size in (len(text), 50):
            stream = open_stream(format, "smollm2")
            for start in range(0, len(text), size):
                stream._feed(text[start : start + size])
            stream.finish("stop")
            shown.append(plain(stream.items))
        assert shown[0] == shown[1]
        assert all(item["type"] in ("text", "malformed_tool_call") for item in shown[0])


def test_reader_of_many_small_pieces_of_a_long_argument():
    text = '{"name": "grep", "arguments": {"pattern": "' + "x y {}" * 3000 + '"}}'
    stream, events, _ = feed(JSON, text)
    assert stream.items[0].arguments == {"pattern": "x y {}" * 3000}
    assert sum(isinstance(event, wire.ToolCallDelta) for event in events) > 1000
