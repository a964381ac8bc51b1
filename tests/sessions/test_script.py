import pytest
from scripted import called, said, scripted
from text_models import qwen3, smollm

from agentserve import wire
from agentserve.assembly import load_text
from agentserve.errors import InvalidRequest
from agentserve.sessions.script import Script, ScriptAnswer, ScriptError, ScriptFile, read_script

pytestmark = pytest.mark.model
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def written(tmp_path, text):
    path = tmp_path / "script.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        '{"answers": [{"text": "a"}, {"raw": "b", "when": "x", "repeat": true}], "context": 4096}',
        '[{"text": "a"}, {"raw": "b", "when": "x", "repeat": true}]',
        '{"text": "a"}\n\n{"raw": "b", "when": "x", "repeat": true}\n',
    ],
)
def test_a_script_is_an_object_a_list_or_lines(tmp_path, text):
    script = read_script(written(tmp_path, text))
    assert script.answers == [ScriptAnswer("a"), ScriptAnswer(raw="b", when="x", repeat=True)]
    assert script.context in (None, 4096)


def test_one_answer_alone_is_a_script(tmp_path):
    assert read_script(written(tmp_path, '{"text": "a"}')).answers == [ScriptAnswer("a")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no answers"),
        ("[]", "no answers"),
        ('{"text": "a"}\n{oops', "line 2"),
        ('[{"text": "a", "raw": "b"}]', "answer 1 needs exactly one"),
        ('[{"text": "a"}, {}]', "answer 2 needs exactly one"),
        ('[{"txt": "a"}]', "unknown field `txt`"),
        ('[{"output": [{"type": "call"}]}]', "type"),
        ('{"answers": [{"text": "a"}], "context": 5}', "context is from"),
        ("7", "object"),
    ],
)
def test_a_bad_script_says_what_is_wrong(tmp_path, text, reason):
    with pytest.raises(ScriptError, match=reason):
        read_script(written(tmp_path, text))


def test_a_script_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ScriptError, match="No such file"):
        read_script(tmp_path / "none.json")


def test_answers_are_due_by_what_is_fed_and_by_order():
    text = load_text(smollm(), "m")
    answers = [
        ScriptAnswer("cold", when="snow"),
        ScriptAnswer("title", system="Name it"),
        ScriptAnswer("again", when="rain", repeat=True),
        ScriptAnswer("first"),
        ScriptAnswer("second"),
    ]
    script = Script(ScriptFile(answers), text)
    stop = text.tokenizer.stop_ids[0]

    def next_text(system, fed):
        ids = memoryview(script.next(system, fed, in_reasoning=False)).cast("i").tolist()
        assert ids.pop() == stop
        return text.tokenizer.decode(ids)

    fed = ["sun", "rain", "snow", "rain", "snow"]
    assert [next_text("", one) for one in fed] == ["first", "again", "cold", "again", "second"]
    assert next_text("Name it now", "x") == "title"
    with pytest.raises(InvalidRequest, match="no answer to this turn"):
        next_text("", "sun")


def test_reasoning_needs_a_model_that_has_it():
    file = ScriptFile([ScriptAnswer(output=[wire.Reasoning("x")])])
    with pytest.raises(ScriptError, match="answer 1 has reasoning"):
        Script(file, load_text(smollm(), "m"))
    Script(file, load_text(qwen3(), "m"))


def test_a_scripted_session_calls_tools_and_keeps_its_kv():
    answers = [called("Oslo", text="I look.", thought="Where?"), said("Cold.", when="minus")]
    with scripted(*answers, family="qwen3") as server:
        session = server.http.post("/sessions", json={"tools": [TOOL]}).json()["id"]
        first = server.http.post(f"/sessions/{session}/turn", json={"input": "weather?"}).json()
        kinds = [item["type"] for item in first["output"]]
        assert kinds == ["reasoning", "text", "tool_call"]
        assert first["output"][0]["text"] == "Where?"
        call = first["pending_calls"][0]["call_id"]
        result = {"type": "tool_result", "call_id": call, "output": "minus 3"}
        second = server.http.post(f"/sessions/{session}/turn", json={"input": [result]}).json()
        assert second["output"][0]["text"] == "Cold."
        before = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        assert second["usage"]["cached_tokens"] >= before - 1


def test_raw_output_is_read_as_the_model_wrote_it():
    raw = (
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {\n</tool_call>'
    )
    with scripted({"raw": raw}, family="qwen3") as server:
        session = server.http.post("/sessions", json={"tools": [TOOL]}).json()["id"]
        turn = server.http.post(f"/sessions/{session}/turn", json={"input": "x"}).json()
        assert [item["type"] for item in turn["output"]] == ["reasoning", "malformed_tool_call"]
