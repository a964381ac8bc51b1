"""Session logs of Claude Code, oddity by oddity; the lines are written by hand."""

from pathlib import Path
from typing import Any

import pytest
from log_lines import write

from agentserve.replay.logged import NO_RESULT, Limits
from agentserve.replay.logs import Log, LogError, load_log
from agentserve.replay.scenario import Said, Scenario, check


class Lines:
    """A log in the making: each line hangs from the one before and comes a second later."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.seconds = 0

    def add(self, type: str, message: dict[str, Any] | None = None, **fields: Any) -> str:
        """Add a line and return its uuid."""
        self.seconds += 1
        uuid = f"u{len(self.lines)}"
        last = self.lines[-1]["uuid"] if self.lines else None
        line = {"type": type, "uuid": uuid, "parentUuid": last, "isSidechain": False}
        line["timestamp"] = f"2026-01-01T00:{self.seconds // 60:02d}:{self.seconds % 60:02d}.000Z"
        self.lines.append(line | ({"message": message} if message is not None else {}) | fields)
        return uuid

    def say(self, content: Any, **fields: Any) -> str:
        return self.add("user", {"role": "user", "content": content}, **fields)

    def result(self, id: str, content: Any = "done", **fields: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": id, "content": content}
        return self.say([block], **fields)

    def answer(self, id: str, *blocks: dict[str, Any], **fields: Any) -> str:
        message = {"id": id, "role": "assistant", "model": "claude", "content": list(blocks)}
        return self.add("assistant", message, **fields)

    def read(self, path: Path, **limits: Any) -> Log:
        log = load_log(write(path / "log.jsonl", *self.lines), Limits(**limits))
        for scenario in log.scenarios:
            check(scenario)
        return log

    def story(self, path: Path) -> Scenario:
        (scenario,) = self.read(path).scenarios
        return scenario


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(id: str, name: str = "Bash", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


@pytest.fixture
def log():
    return Lines()


def test_a_tool_loop_with_its_waits(log, tmp_path):
    log.add("file-history-snapshot", messageId="m")
    log.say("What is here?")
    log.answer("m1", text("I look."))
    log.answer("m1", use("t1", command="ls"))
    log.seconds += 10
    log.result("t1", [{"type": "text", "text": "main.py"}, {"type": "image", "source": {}}])
    log.answer("m2", text("Only main.py."))
    scenario = log.story(tmp_path)
    first, second = scenario.turns
    assert scenario.system is None
    assert first.said == [Said("user", "What is here?")]
    assert first.text == "I look."
    assert first.calls[0].arguments == {"command": "ls"}
    assert first.calls[0].result == "main.py\n[image]"
    assert first.tool_seconds == 11.0
    assert (second.said, second.text) == ([], "Only main.py.")
    assert scenario.tools[0].parameters["properties"] == {"command": {"type": "string"}}


def test_results_of_parallel_calls_that_hang_from_other_lines_are_found(log, tmp_path):
    log.say("go")
    one = log.answer("m1", use("t1", command="a"))
    two = log.answer("m1", use("t2", command="b"))
    log.result("t1", "first", parentUuid=one)
    log.answer("m1", use("t3", command="c"), parentUuid=two)
    log.result("t3", "third")
    log.result("t2", "second", parentUuid=two)
    log.answer("m2", text("ok"))
    first, second = log.story(tmp_path).turns
    assert [call.result for call in first.calls] == ["first", "second", "third"]
    assert second.text == "ok"


def test_a_branch_that_the_user_went_back_from_is_left_out(log, tmp_path):
    root = log.say("go")
    log.answer("m1", text("wrong"))
    log.say("no!")
    log.answer("m2", text("worse"))
    log.answer("m3", text("right"), parentUuid=root)
    read = log.read(tmp_path)
    assert [turn.text for turn in read.scenarios[0].turns] == ["right"]
    assert "messages on branches that the user went back from, left out: 3" in read.notes


def test_after_a_compaction_the_story_starts_from_the_summary(log, tmp_path):
    log.say("go")
    log.answer("m1", use("t1", command="a"))
    last = log.result("t1")
    log.answer("m2", text("long talk"))
    log.add("system", subtype="compact_boundary", parentUuid=None, logicalParentUuid=last)
    log.say("Summary: it went well.", isCompactSummary=True)
    log.say("go on")
    log.answer("m3", text("going"))
    first, *_, after = log.story(tmp_path).turns
    assert first.reset is False
    assert after.reset is True
    assert [said.content for said in after.said] == ["Summary: it went well.", "go on"]


def test_a_compaction_that_keeps_messages_is_one_although_the_tree_goes_past_it(log, tmp_path):
    log.say("go")
    log.answer("m1", text("one"))
    log.say("and?")
    kept = log.answer("m2", text("two"))
    preserved = {"preservedMessages": {"anchorUuid": "u5", "uuids": [kept]}}
    log.add("system", subtype="compact_boundary", parentUuid=None, compactMetadata=preserved)
    log.say("Summary.", isCompactSummary=True)
    log.say("more", parentUuid=kept)
    log.answer("m3", text("three"))
    read = log.read(tmp_path)
    *before, after = read.scenarios[0].turns
    assert [turn.text for turn in before] == ["one", "two"]
    assert after.reset is True
    assert [said.content for said in after.said] == ["Summary.", "more"]
    assert "messages kept over a compaction, left out of the history after it: 1" in read.notes


def test_lines_without_a_parent_that_begin_nothing_follow_the_line_before(log, tmp_path):
    log.say("go")
    log.answer("m1", use("t1", command="a"), parentUuid=None)
    log.result("t1", parentUuid=None)
    log.answer("m2", text("ok"), parentUuid=None)
    assert [turn.text for turn in log.story(tmp_path).turns] == ["", "ok"]


def test_sub_agents_are_sessions_of_their_own(log, tmp_path):
    log.say("go")
    parent = log.answer("m1", use("t1", "Task", prompt="look"))
    log.say("look", isSidechain=True, parentUuid=None)
    log.answer("m2", text("I saw."), isSidechain=True)
    log.result("t1", "I saw.", parentUuid=parent)
    log.answer("m3", text("ok"))
    read = log.read(tmp_path)
    texts = [[turn.text for turn in one.turns] for one in read.scenarios]
    assert texts == [["", "ok"], ["I saw."]]
    assert "sessions of sub-agents, played from the start beside the others: 1" in read.notes


def test_a_sub_agent_that_hangs_from_its_parent_is_told_apart_too(log, tmp_path):
    log.say("go")
    parent = log.answer("m1", use("t1", "Task", prompt="look"))
    log.say("look", isSidechain=True, agentId="a1")
    log.answer("m2", text("I saw."), isSidechain=True)
    log.result("t1", "I saw.", parentUuid=parent)
    assert [len(one.turns) for one in log.read(tmp_path).scenarios] == [1, 1]


def test_the_log_of_a_sub_agent_alone_is_a_plain_session(log, tmp_path):
    log.say("look", isSidechain=True, agentId="a1")
    log.answer("m1", text("I saw."), isSidechain=True, agentId="a1")
    read = log.read(tmp_path)
    assert (len(read.scenarios), read.notes) == (1, [])


def test_a_second_root_is_a_second_conversation(log, tmp_path):
    log.say("go")
    log.answer("m1", text("one"))
    log.say("/clear and again", parentUuid=None)
    log.answer("m2", text("two"))
    assert [one.turns[0].text for one in log.read(tmp_path).scenarios] == ["one", "two"]


def test_a_line_whose_parent_is_missing_follows_the_line_before(log, tmp_path):
    log.say("go")
    log.answer("m1", text("one"))
    log.say("and?", parentUuid="cut-away")
    log.answer("m2", text("two"))
    assert [turn.text for turn in log.story(tmp_path).turns] == ["one", "two"]


def test_lines_beside_the_conversation_do_not_break_the_path(log, tmp_path):
    log.add("progress", data={"type": "hook_progress"})
    log.say("go", isMeta=True)
    log.add("system", subtype="turn_duration", durationMs=5)
    log.add("attachment", attachment={})
    log.answer("m1", text("one"))
    log.lines.append({"type": "queue-operation", "operation": "enqueue"})
    log.lines.append({"type": "summary", "summary": "s", "leafUuid": "u4"})
    assert [turn.text for turn in log.story(tmp_path).turns] == ["one"]


def test_answers_that_no_model_gave_are_left_out(log, tmp_path):
    log.say("go")
    log.answer("m0", text("API Error: 529"), isApiErrorMessage=True)
    synthetic = {"id": "m1", "role": "assistant", "model": "<synthetic>"}
    log.add("assistant", synthetic | {"content": [text("No response requested.")]})
    log.answer("m2", text("one"))
    read = log.read(tmp_path)
    assert [turn.text for turn in read.scenarios[0].turns] == ["one"]
    assert "answers that no model gave (errors, interruptions), left out: 2" in read.notes


def test_thinking_is_left_out_and_an_answer_of_thinking_alone_too(log, tmp_path):
    log.say("go")
    log.answer("m1", {"type": "thinking", "thinking": "Hm.", "signature": "x"})
    log.answer("m1", text("one"))
    log.say("and?")
    log.answer("m2", {"type": "redacted_thinking", "data": "x"})
    read = log.read(tmp_path)
    assert [turn.text for turn in read.scenarios[0].turns] == ["one"]
    assert "answers whose thinking is left out: 2" in read.notes


def test_an_interrupted_call_and_words_beside_a_result(log, tmp_path):
    log.say("go")
    log.answer("m1", use("t1", command="a"), use("t2", command="b"))
    denied = {"type": "tool_result", "tool_use_id": "t1", "content": "denied", "is_error": True}
    log.say([denied, text("[Request interrupted by user for tool use]")])
    log.say("rather this")
    log.answer("m2", text("ok"))
    first, second = log.story(tmp_path).turns
    assert [call.result for call in first.calls] == ["denied", NO_RESULT]
    assert [said.content for said in second.said] == [
        "[Request interrupted by user for tool use]",
        "rather this",
    ]


def test_a_wait_for_permission_is_cut(log, tmp_path):
    log.say("go")
    log.answer("m1", use("t1", command="a"))
    log.seconds += 600
    log.result("t1")
    log.answer("m2", text("ok"))
    assert log.read(tmp_path).scenarios[0].turns[0].tool_seconds == 60.0
    assert log.read(tmp_path, max_wait=1e6).scenarios[0].turns[0].tool_seconds == 601.0


def test_lines_without_ids_and_times_are_a_list(log, tmp_path):
    log.say("go")
    log.answer("m1", text("one"))
    log.say("and?")
    log.answer("m2", text("two"))
    for line in log.lines:
        for name in ("uuid", "parentUuid", "timestamp"):
            del line[name]
    assert [turn.text for turn in log.story(tmp_path).turns] == ["one", "two"]


def test_a_line_that_was_written_twice_counts_once(log, tmp_path):
    log.say("go")
    log.answer("m1", text("one"))
    log.lines += log.lines[:]
    assert [turn.text for turn in log.story(tmp_path).turns] == ["one"]


def test_a_circle_of_parents_is_no_endless_loop(log, tmp_path):
    log.say("go", parentUuid="u1")
    log.answer("m1", text("one"))
    assert [turn.text for turn in log.story(tmp_path).turns] == ["one"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "line 3: no object with a type"),
        ({"uuid": "x"}, "line 3: no object with a type"),
        ({"type": "user", "uuid": "x"}, "line 3: a line of type user has no message"),
        (
            {"type": "assistant", "message": {"id": "m", "content": 5}},
            "line 3: an answer's content is neither text nor a list",
        ),
        ({"type": "user", "message": {"content": 5}}, "line 3: a content is neither"),
        ({"type": "user", "message": {"content": [5]}}, "line 3: a part of a content"),
    ],
)
def test_a_malformed_line_is_named(log, tmp_path, line, message):
    log.say("go")
    log.answer("m1", text("one"))
    log.lines.append(line)
    with pytest.raises(LogError, match=message):
        log.read(tmp_path)
