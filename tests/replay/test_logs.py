"""Log files of any content: what they are taken for, and what is said of those that are none."""

import gzip
import json
import os
from pathlib import Path

import pytest
from log_lines import SESSION, assistant, call, tool, user, write

from agentserve.replay.logged import Limits
from agentserve.replay.logs import LogError, load_log
from agentserve.replay.scenario import check

CLAUDE = [
    {"type": "summary", "summary": "A talk", "leafUuid": "b"},
    {"type": "user", "uuid": "a", "parentUuid": None, "message": user("hello")},
    {
        "type": "assistant",
        "uuid": "b",
        "parentUuid": "a",
        "message": {"id": "m1", "role": "assistant", "content": [{"type": "text", "text": "hi"}]},
    },
]


def load(path: Path, **limits):
    return load_log(path, Limits(**limits))


@pytest.mark.parametrize(
    ("lines", "format"),
    [
        ([{"messages": SESSION}], "OpenAI messages, a session per line, 1 session"),
        ([SESSION, SESSION], "OpenAI messages, a session per line, 2 sessions"),
        (
            [{"custom_id": "x", "body": {"model": "m", "messages": SESSION}}],
            "OpenAI messages, a session per line, 1 session",
        ),
        (SESSION, "OpenAI messages, a message per line, 1 session"),
        (CLAUDE, "a session log of Claude Code, 1 session"),
    ],
)
def test_the_first_line_that_tells_decides_what_the_log_is(tmp_path, lines, format):
    log = load(write(tmp_path / "log.jsonl", *lines))
    assert log.format == format
    for scenario in log.scenarios:
        check(scenario)


def test_the_same_session_is_the_same_story_in_each_form(tmp_path):
    whole = load(write(tmp_path / "a.jsonl", {"messages": SESSION})).scenarios
    lines = load(write(tmp_path / "b.jsonl", *SESSION)).scenarios
    assert [one.turns for one in whole] == [one.turns for one in lines]


def test_gzip_a_byte_order_mark_windows_line_ends_and_empty_lines_do_not_matter(tmp_path):
    lines = [json.dumps(message).encode() for message in SESSION]
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines)))
    assert len(load(path).scenarios[0].turns) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b'{"messages": []}\n{"mess', "line 2: not JSON"),
        (b"[\n{", "line 1: not JSON"),
        (b'{"role": "user", "content": "\xff"}\n', r"line 1: not UTF-8 \(byte 30\)"),
        (b"\x00\x00\x00\n", "line 1: not JSON"),
        (b'{"messages": [{"role": "user", "n": NaN}]}', "line 1: not usable JSON: NaN"),
        (b'{"n": 1e999}', "line 1: not usable JSON: a number is too large"),
        (b"[" * 100_000 + b"]" * 100_000, "line 1: not usable JSON"),
        (b'{"event": "start"}\n[1, 2]\n"text"\n7\nnull\n', "no line is a list of OpenAI messages"),
        (b'{"messages": [{"role": "user", "content": "x"}]}\n{"x": 1}', "line 2: no list of mess"),
        (b'{"role": "user", "content": "x"}\n{"x": 1}', "line 2: no message with a role"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "without an answer of a model"),
        (b'{"messages": []}', "without an answer of a model"),
    ],
)
def test_a_file_that_is_no_log_is_refused_with_its_name_and_line(tmp_path, content, message):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(LogError, match=message) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(os.urandom(5000))[:4000], b""])
def test_a_damaged_gzip_file_is_refused(tmp_path, content):
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(LogError):
        load(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(LogError):
            load(path)


def test_a_line_of_twenty_megabytes_is_read(tmp_path):
    output = "x" * 20_000_000
    messages = [user("go"), assistant(None, call("c")), tool("c", output), assistant("ok")]
    (scenario,) = load(write(tmp_path / "log.jsonl", {"messages": messages})).scenarios
    assert scenario.turns[0].calls[0].result == output


def test_numbers_and_texts_that_cannot_be_sent_on_are_made_sendable(tmp_path):
    wide = f'{{"n": {10**30}}}'
    line = (
        rb'{"messages": [{"role": "user", "content": "cut \ud83d here, whole \ud83d\ude00"}, '
        rb'{"role": "assistant", "content": "a", "tool_calls": [{"id": "c", "function": '
        rb'{"name": "f", "arguments": "{\"half\": \"\\ude00\"}"}}, '
        rb'{"id": "d", "function": {"name": "f", "arguments": '
        + json.dumps(wide).encode()
        + b"}}]}]}"
    )
    (scenario,) = load(write(tmp_path / "log.jsonl", line)).scenarios
    (turn,) = scenario.turns
    assert turn.said[0].content == "cut ? here, whole \N{GRINNING FACE}"
    assert [call.arguments for call in turn.calls] == [{"half": "?"}, {"n": 1e30}]


def test_only_so_many_turns_are_taken(tmp_path):
    path = write(tmp_path / "log.jsonl", {"messages": SESSION})
    (short,) = load(path, turns=2).scenarios
    assert [turn.text for turn in short.turns] == ["", "Only main.py is here."]
