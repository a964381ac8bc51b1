"""OpenAI messages as agents log them, oddity by oddity."""

import pytest
from log_lines import SESSION, assistant, call, tool, user, write

from agentserve.replay.logged import NO_RESULT, Limits
from agentserve.replay.logs import LogError, load_log
from agentserve.replay.scenario import Call, Said, check


@pytest.fixture
def load(tmp_path):
    """Write the lines as a log, read it, and check every story."""

    def read(*lines, **limits):
        log = load_log(write(tmp_path / "log.jsonl", *lines), Limits(**limits))
        for scenario in log.scenarios:
            check(scenario)
        return log

    return read


def story(log):
    (scenario,) = log.scenarios
    return scenario


def test_a_session_becomes_turns_with_their_calls_and_results(load):
    scenario = story(load({"messages": SESSION}))
    first, second, third = scenario.turns
    assert scenario.system == "You fix programs."
    assert first.said == [Said("user", "What is here?")]
    assert first.calls == [Call("bash", {"command": "ls"}, "main.py")]
    assert (second.said, second.text) == ([], "Only main.py is here.")
    assert (third.said, third.text) == ([Said("user", "Thanks.")], "Good luck with it.")


def test_declared_tools_are_taken_and_undeclared_ones_inferred_from_their_calls(load):
    declared = {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}
    calls = (
        call("a", "look", '{"at": 3, "deep": true}'),
        call("b", "look", '{"at": "x", "list": [], "none": null}'),
    )
    messages = [user("go"), assistant(None, call("c"), *calls)]
    tools = story(
        load(
            {
                "messages": messages,
                "tools": [
                    {"type": "function", "function": declared},
                    {"name": "find", "input_schema": {"type": "object", "required": []}},
                    {"type": "web_search"},
                    "nonsense",
                ],
            }
        )
    ).tools
    assert [tool.name for tool in tools] == ["bash", "find", "look"]
    assert tools[0].description == "Run."
    assert tools[1].parameters == {"type": "object", "required": []}
    assert tools[2].parameters["properties"] == {
        "at": {},
        "deep": {"type": "boolean"},
        "list": {"type": "array"},
        "none": {},
    }


def test_parallel_calls_take_as_long_as_the_slowest_and_results_find_their_calls(load):
    messages = [
        user("go"),
        assistant(None, call("a"), call("b")),
        tool("b", "second"),
        tool("a", "first"),
        assistant("ok"),
    ]
    (turn, _) = story(load({"messages": messages, "tool_seconds": [3.5, None]})).turns
    assert [call.result for call in turn.calls] == ["first", "second"]
    assert turn.tool_seconds == 3.5


@pytest.mark.parametrize(
    ("called", "answered", "seconds"),
    [
        ("2026-01-01T00:00:00.000Z", "2026-01-01T00:00:02.500Z", 2.5),
        (1_750_000_000, 1_750_000_004, 4.0),
        (1_750_000_000_000, 1_750_000_001_500, 1.5),
        (1_750_000_009, 1_750_000_004, 0.0),
        ("yesterday", "today", 7.0),
        (None, 5, 7.0),
        (True, False, 7.0),
    ],
)
def test_times_of_the_messages_give_the_wait(load, called, answered, seconds):
    messages = [
        user("go"),
        assistant(None, call("a")) | {"timestamp": called},
        tool("a") | {"timestamp": answered},
        assistant("ok"),
    ]
    (turn, _) = story(load({"messages": messages}, tool_seconds=7.0)).turns
    assert turn.tool_seconds == seconds


def test_a_wait_for_a_person_is_cut_and_that_is_said(load):
    messages = [user("go"), assistant(None, call("a")), tool("a"), assistant("ok")]
    log = load({"messages": messages, "tool_seconds": [77_066]}, max_wait=20.0)
    assert story(log).turns[0].tool_seconds == 20.0
    assert "tool waits cut to --max-wait: 1" in log.notes


def test_a_call_without_a_result_is_answered_because_no_endpoint_takes_it_otherwise(load):
    messages = [
        user("go"),
        assistant(None, call("a"), call("b")),
        tool("b"),
        user("stop"),
        assistant("ok"),
    ]
    log = load({"messages": messages})
    assert [call.result for call in story(log).turns[0].calls] == [NO_RESULT, "done"]
    assert "calls without a result, answered with a remark: 1" in log.notes


def test_ids_that_start_again_in_every_answer_name_the_newest_call(load):
    messages = [
        user("go"),
        assistant(None, call("call_0")),
        tool("call_0", "one"),
        assistant(None, call("call_0")),
        tool("call_0", "two"),
        assistant("ok"),
    ]
    turns = story(load({"messages": messages})).turns
    assert [turn.calls[0].result for turn in turns[:2]] == ["one", "two"]


def test_the_call_form_of_2023_and_calls_without_ids_are_read(load):
    old = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": '{"a": 1}'},
    }
    messages = [user("go"), old, {"role": "function", "name": "f", "content": "r"}, assistant("ok")]
    assert story(load({"messages": messages})).turns[0].calls == [Call("f", {"a": 1}, "r")]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": {"b": [1]}}', {"a": {"b": [1]}}),
        ("", {}),
        ('{"a": ', {"input": '{"a": '}),
        ("[1]", {"input": [1]}),
        ('{"a": NaN}', {"input": '{"a": NaN}'}),
        ({"a": 1}, {"a": 1}),
        (None, {"input": None}),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(load, written, read):
    messages = [user("go"), assistant(None, call("a", "f", written))]
    assert story(load({"messages": messages})).turns[0].calls[0].arguments == read


def test_names_that_no_api_takes_are_renamed_everywhere(load):
    log = load({"messages": [user("go"), assistant(None, call("a", "mcp.files/read" + "x" * 70))]})
    scenario = story(log)
    (name,) = {scenario.tools[0].name, scenario.turns[0].calls[0].name}
    assert name == ("mcp_files_read" + "x" * 70)[:64]
    assert "calls of tools whose names no API takes, renamed: 1" in log.notes


def test_parts_of_a_content_become_text_and_what_is_none_is_named(load):
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        "loose",
    ]
    turn = story(load({"messages": [user(parts), assistant("I see.")]})).turns[0]
    assert turn.said[0].content == "Look:\n[image_url]\nloose"


def test_messages_in_a_row_stay_messages_and_their_roles(load):
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "system", "content": "b"},
        user("c"),
        user(None),
        assistant("ok"),
        {"role": "system", "content": "d"},
        assistant("ok too"),
    ]
    scenario = story(load({"messages": messages}))
    assert scenario.system == "a"
    assert [turn.said for turn in scenario.turns] == [
        [Said("system", "b"), Said("user", "c"), Said("user", "")],
        [Said("system", "d")],
    ]


def test_a_greeting_is_told_and_not_generated(load):
    messages = [
        {"role": "system", "content": "s"},
        assistant("Hello, I am here."),
        user("hi"),
        assistant("What is it?"),
    ]
    (turn,) = story(load({"messages": messages})).turns
    assert turn.said == [Said("assistant", "Hello, I am here."), Said("user", "hi")]


def test_a_log_that_begins_inside_a_tool_loop_begins_at_the_next_question(load):
    messages = [
        assistant(None, call("a")),
        tool("a"),
        assistant("half"),
        user("go"),
        assistant("ok"),
    ]
    log = load({"messages": messages})
    (turn,) = story(log).turns
    assert turn.said == [Said("assistant", "half"), Said("user", "go")]
    assert "tool results without their call, left out: 1" in log.notes


def test_empty_answers_are_left_out_and_answers_in_a_row_joined(load):
    messages = [
        user("go"),
        assistant(""),
        assistant("one"),
        assistant("two", call("a")),
        tool("a"),
        assistant(None),
        user("and?"),
        assistant("three"),
    ]
    log = load({"messages": messages})
    first, second = story(log).turns
    assert (first.text, len(first.calls)) == ("one\n\ntwo", 1)
    assert first.calls[0].result == "done"
    assert second.said == [Said("user", "and?")]
    assert "answers without words and calls, left out: 2" in log.notes
    assert "answers that follow another at once, joined to it: 1" in log.notes


def test_thinking_is_left_out_and_said_to_be(load):
    log = load({"messages": [user("go"), assistant("ok") | {"reasoning_content": "Hm."}]})
    assert story(log).turns[0].text == "ok"
    assert "answers whose thinking is left out: 1" in log.notes


def test_requests_that_a_later_one_continues_are_the_same_session(load):
    requests = [{"messages": SESSION[:2]}, {"messages": SESSION[:4]}, {"messages": SESSION}]
    log = load(*requests, {"messages": [user("other"), assistant("yes")]})
    assert [len(one.turns) for one in log.scenarios] == [3, 1]
    assert "lines that a later line continues, left out: 2" in log.notes


def test_a_logged_response_is_the_answer_of_its_request(load):
    def line(count):
        answer = {"choices": [{"message": SESSION[count] | {"refusal": None}}]}
        return {"request": {"messages": SESSION[:count]}, "response": answer}

    scenario = story(load(line(2), line(4), line(6)))
    assert scenario.turns[-1].text == "Good luck with it."
    assert len(scenario.turns) == 3


def test_sessions_of_equal_content_stay_two(load):
    assert len(load({"messages": SESSION}, {"messages": SESSION}).scenarios) == 2


def test_messages_of_several_sessions_are_told_apart_by_the_session_id(load):
    lines = [
        message | {"session_id": name}
        for pair in zip(SESSION, SESSION, strict=True)
        for message, name in zip(pair, ("one", 2), strict=True)
    ]
    assert [len(one.turns) for one in load(*lines).scenarios] == [3, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [user("x"), 3]}, "line 2: a message is no object"),
        ({"messages": [{"role": "robot"}]}, "line 2: a message has the role 'robot'"),
        ({"messages": [{"content": "x"}]}, "line 2: a message has the role None"),
        ({"messages": [user(5)]}, "line 2: a content is neither text nor a list"),
        ({"messages": [user([5])]}, "line 2: a part of a content is no object"),
        ({"messages": [assistant() | {"tool_calls": 3}]}, "line 2: tool_calls is no list"),
        ({"messages": [assistant() | {"tool_calls": [{}]}]}, "line 2: a tool call has no function"),
        ({"messages": [tool("a")], "tool_seconds": [1, 2]}, "line 2: 2 tool_seconds for 1 tool"),
        ({"messages": [tool("a")], "tool_seconds": ["x"]}, "line 2: tool_seconds has 'x'"),
        ({"messages": [tool("a")], "tool_seconds": [-1]}, "line 2: tool_seconds has -1"),
    ],
)
def test_a_malformed_line_is_named(load, line, message):
    with pytest.raises(LogError, match=message):
        load({"messages": SESSION}, line)
