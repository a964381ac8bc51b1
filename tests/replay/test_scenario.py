"""Scenario files: what is refused, and where the message points."""

from pathlib import Path

import pytest

from agentserve.replay.scenario import Call, Scenario, ScenarioError, digest, load_scenario

HEAD = 'format = 1\nname = "n"\ndescription = "d"\nsystem = "s"\n'
TOOL = """
[[tools]]
name = "look"
description = "Look."
parameters = { type = "object", properties = { at = { type = "string" } }, required = ["at"] }
example = { at = "home" }
"""
TURN = '[[turns]]\nuser = "hello"\n'
CALL = 'calls = [{ name = "look", arguments = { at = "sea" }, result = "water" }]\n'


def load(directory: Path, text: str) -> Scenario:
    path = directory / "story.toml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(path)


def test_a_story_with_a_scripted_tool_is_read(tmp_path):
    story = load(tmp_path, HEAD + TOOL + TURN + CALL + '[[turns]]\ntext = "Blue."\n')
    forced = story.turns[0].forced()
    assert [(item.name, item.arguments) for item in forced] == [("look", {"at": "sea"})]
    assert story.turns[1].forced()[0].text == "Blue."
    assert story.tools[0].declared().examples == [{"at": "home"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = 2\n", "format is 2, this version reads format 1"),
        ("", "format is none"),
        ("format = [", "Invalid value"),
        (HEAD, "missing required field `turns`"),
        (HEAD + "turns = []\n", "turns: Expected `array` of length >= 1"),
        (HEAD + TURN, "turn 1: give either text or calls, or free = true"),
        (HEAD + TURN + 'free = true\ntext = "no"\n', "turn 1: give either text or calls"),
        (HEAD + TURN + "tool_seconds = -1\n", "turn 1: tool_seconds: Expected `float` >= 0.0"),
        (HEAD + TURN + 'speech = "x"\n', "turn 1: Object contains unknown field `speech`"),
        (HEAD + '[[turns]]\ntext = "x"\n', "turn 1: nothing to answer"),
        (HEAD + TURN + 'text = "x"\n[[turns]]\ntext = "y"\n', "turn 2: nothing to answer"),
        (HEAD + '[[turns]]\nreset = true\ntext = "x"\n', "turn 1: nothing to answer"),
        (
            HEAD + TOOL + TURN + CALL + '[[turns]]\nreset = true\ntext = "y"\n',
            "turn 2: nothing to answer",
        ),
        (
            HEAD
            + TOOL
            + TURN
            + CALL
            + '[[turns]]\nsaid = [{ role = "assistant", content = "a" }]\n'
            'text = "y"\n',
            "turn 2: an assistant message can be said at a beginning only",
        ),
        (
            HEAD + '[[turns]]\nsaid = [{ role = "tool", content = "a" }]\ntext = "y"\n',
            "turn 1: said[0].role: Invalid enum value 'tool'",
        ),
        (HEAD + TURN + CALL, "turn 1: look is not one of the tools"),
        (HEAD + TOOL + TURN + 'calls = [{ name = "look" }]\n', "turn 1: look is not a real tool"),
        (
            HEAD + TOOL + TURN + 'calls = [{ name = "look", result = "x" }]\n',
            "turn 1: look: 'at' is a required property",
        ),
        (
            HEAD + TOOL.replace('"home"', "3") + TURN + 'text = "x"\n',
            "tool look: its example: 3 is not of type 'string'",
        ),
        (
            HEAD + '[files]\n"../x" = "y"\n' + TURN + 'text = "x"\n',
            "files: ../x leaves the workspace",
        ),
    ],
)
def test_a_wrong_story_is_refused_with_its_file_and_place(tmp_path, text, message):
    with pytest.raises(ScenarioError) as refused:
        load(tmp_path, text)
    assert str(refused.value).startswith(str(tmp_path / "story.toml"))
    assert message in str(refused.value)


def test_a_missing_file_is_a_scenario_error(tmp_path):
    with pytest.raises(ScenarioError, match="No such file"):
        load_scenario(tmp_path / "none.toml")


def test_parallel_calls_take_as_long_as_the_slowest_unless_the_turn_says_otherwise(tmp_path):
    slow = TOOL.replace("look", "wait") + "seconds = 3.0\n"
    calls = CALL.replace("]", ', { name = "wait", arguments = { at = "x" }, result = "y" }]')
    story = load(
        tmp_path,
        HEAD + TOOL + slow + TURN + calls + "[[turns]]\n" + CALL + "tool_seconds = 0.5\n",
    )
    assert [story.tool_seconds(turn) for turn in story.turns] == [3.0, 0.5]


def test_a_call_in_one_line_quotes_its_strings():
    assert Call("search", {"text": "need():", "line": 3}).summary == 'search("need():", 3)'
    assert Call("insert", {"text": "a\n"}).summary == 'insert("a\\n")'


def test_messages_of_any_role_may_be_said_and_a_system_prompt_left_out(tmp_path):
    said = 'said = [{ role = "assistant", content = "hi" }, { role = "user", content = "go" }]\n'
    head = HEAD.replace('system = "s"\n', "")
    story = load(tmp_path, head + "[[turns]]\n" + said + 'text = "ok"\n')
    assert story.system is None
    assert [one.content for one in story.turns[0].history] == ["hi"]


def test_equal_work_has_the_same_digest_whatever_it_is_called(tmp_path):
    story = load(tmp_path, HEAD + TURN + 'text = "x"\n')
    renamed = load(tmp_path, HEAD.replace('"n"', '"m"') + TURN + 'text = "x"\n')
    other = load(tmp_path, HEAD + TURN + 'text = "y"\n')
    assert digest([story]) == digest([renamed]) != digest([other])
    assert digest([story]) != digest([story, story])


def test_the_size_of_an_answer_is_that_of_its_text_and_of_its_calls_as_json(tmp_path):
    story = load(tmp_path, HEAD + TOOL + TURN + 'text = "é"\n' + CALL)
    assert story.turns[0].output_bytes == 2 + len('{"name": "look", "arguments": {"at": "sea"}}')
