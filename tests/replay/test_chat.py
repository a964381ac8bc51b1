"""The chat dialect against a foreign endpoint on a real socket: what is sent, measured and said."""

import io
import itertools
import json

import pytest
from foreign_endpoint import MODEL, Foreign
from live_server import serving
from log_lines import SESSION, assistant, call, tool, user, write
from rich.console import Console

from agentserve.replay.chat import replay_chat
from agentserve.replay.command import ReplayOptions, run_replay
from agentserve.replay.endpoint import Endpoint
from agentserve.replay.generator import Workload, generate
from agentserve.replay.logged import Limits
from agentserve.replay.logs import load_log
from agentserve.replay.report import Report, TurnRecord
from agentserve.replay.runner import ReplayError, ReplaySettings
from agentserve.replay.scenario import FORMAT, Said, Scenario, ScenarioTurn

FAST = float("inf")


class Silent:
    """Shows nothing."""

    def heard(self, user: str) -> None: ...

    def turn(self, record: TurnRecord) -> None: ...


@pytest.fixture
def log(tmp_path):
    """Return a function from messages to the stories of a log with a session a line."""

    def read(*sessions):
        lines = [{"messages": messages} for messages in sessions]
        return load_log(write(tmp_path / "log.jsonl", *lines), Limits()).scenarios

    return read


async def play(
    foreign: Foreign,
    scenarios: list[Scenario],
    *,
    path: str = "/v1",
    key: str | None = None,
    model: str | None = None,
    extra: dict | None = None,
    **settings,
) -> Report:
    with serving(foreign.app) as port:
        endpoint = Endpoint(f"http://127.0.0.1:{port}{path}", key, model, extra or {})
        return await replay_chat(
            scenarios, endpoint, ReplaySettings(speed=FAST, **settings), Silent()
        )


async def test_every_turn_sends_the_whole_history_with_the_logs_own_answers(log):
    foreign = Foreign()
    report = await play(foreign, log(SESSION))
    assert report.incomplete == []
    first, second, third = [body["messages"] for body in foreign.bodies]
    assert first == SESSION[:2]
    assert second[:2] == first
    (made,) = second[2]["tool_calls"]
    assert made["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert second[2]["content"] is None
    assert second[3] == {"role": "tool", "tool_call_id": made["id"], "content": "main.py"}
    assert len(made["id"]) == 9
    assert made["id"].isalnum()
    assert third == [*second, *SESSION[4:6]]
    for body in foreign.bodies:
        assert body["model"] == MODEL
        assert body["stream"] is True
        assert [tool["function"]["name"] for tool in body["tools"]] == ["bash"]


async def test_times_and_counts_are_what_the_stream_says(log):
    report = await play(Foreign(), log(SESSION))
    for record in report.records:
        assert 0 < record.ttft_s < record.latency_s
        assert record.output_tokens == min(8, record.asked_tokens)
    prompts = [record.input_tokens for record in report.records]
    assert [record.cached_tokens for record in report.records] == [0, prompts[0], prompts[1]]
    assert [record.new_tokens for record in report.records[1:]] == [
        later - earlier for earlier, later in itertools.pairwise(prompts)
    ]
    assert report.run.dialect == "chat"
    assert report.run.model == MODEL
    assert report.work.turns == 3


async def test_the_length_asked_for_is_a_token_per_four_bytes_or_that_of_another_report(log):
    foreign = Foreign()
    (scenario,) = log([user("go"), assistant("é" * 10), user("and?"), assistant("12345678")])
    await play(foreign, [scenario], lengths={(1, 2): 77})
    assert [body["max_tokens"] for body in foreign.bodies] == [5, 77]


async def test_more_fields_are_sent_and_null_takes_one_away(log):
    foreign = Foreign()
    extra = {"ignore_eos": True, "min_tokens": "{max_tokens}", "temperature": None}
    report = await play(foreign, log(SESSION), extra=extra, lengths={(1, 1): 20})
    first = foreign.bodies[0]
    assert (first["ignore_eos"], first["min_tokens"], first["max_tokens"]) == (True, 20, 20)
    assert "temperature" not in first
    assert report.records[0].output_tokens == 20


async def test_after_a_reset_the_history_is_the_system_prompt_and_what_is_said():
    foreign = Foreign()
    turns = [
        ScenarioTurn(said=[Said("user", "go")], text="one"),
        ScenarioTurn(said=[Said("user", "summary")], reset=True, text="two"),
    ]
    scenario = Scenario(format=FORMAT, name="n", description="d", system="s", turns=turns)
    report = await play(foreign, [scenario])
    assert [one["content"] for one in foreign.bodies[1]["messages"]] == ["s", "summary"]
    assert report.records[1].new_tokens == report.records[1].input_tokens


async def test_generated_workloads_run_side_by_side():
    workload = Workload(sessions=3, turns=3, prompt=30, new=10, output=20, gap=0.0)
    report = await play(Foreign(), generate(workload))
    assert sorted((one.session, one.index) for one in report.records) == [
        (session, index) for session in (1, 2, 3) for index in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("counts", "missing", "present"),
    [
        ("all", {"model_s"}, {"input_tokens", "cached_tokens", "output_tokens"}),
        ("no cache", {"cached_tokens", "prefill_computed"}, {"input_tokens", "output_tokens"}),
        ("none", {"input_tokens", "cached_tokens", "output_tokens"}, {"ttft_s"}),
    ],
)
async def test_what_the_endpoint_does_not_report_is_null(log, counts, missing, present):
    report = await play(Foreign(counts=counts), log(SESSION))
    document = json.loads(report.to_json())
    for turn in document["turns"]:
        assert {name for name in missing if turn[name] is not None} == set()
        assert {name for name in present if turn[name] is None} == set()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("fail", "it failed in the stream: out of memory"),
        ("break off", "the stream ended before its answer did"),
        ("garble", "a line of the stream cannot be read"),
        ("plain", "the answer is application/json, not an event stream"),
        ("overloaded", "answers 429: <html>slow down</html>; it is overloaded or not ready"),
    ],
)
async def test_a_session_that_fails_ends_early_and_the_others_go_on(log, said, why):
    bad = [user("go"), assistant("ok"), user(said), assistant("a long answer of some tokens")]
    report = await play(Foreign(), log(bad, SESSION))
    (failure,) = report.incomplete
    assert failure.startswith("session 1, turn 2: ")
    assert why in failure
    assert len(report.records) == 1 + 3


async def test_a_history_that_outgrows_the_context_says_what_to_do(log):
    messages = [user("go"), assistant(None, call("a")), tool("a", "word " * 500), assistant("ok")]
    report = await play(Foreign(context=300), log(messages))
    (failure,) = report.incomplete
    assert "answers 400: This model's maximum context length is 300 tokens." in failure
    assert "--turns" in failure


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"key": "wrong"}, r"answers 401: Incorrect API key provided; give the key with --api-key"),
        ({"key": "right", "path": "/v2"}, "names no model .* It usually ends in /v1|ends in /v1"),
        ({"key": "right", "path": "/bare"}, "name the model with --model"),
        ({"key": "right", "path": "/v2", "model": MODEL}, "answers 404: .*/chat/completions under"),
        ({"key": "right", "model": "gpt"}, "answers 404: .*`gpt` does not exist.*--model"),
    ],
)
async def test_an_endpoint_that_refuses_everything_is_an_error_that_says_what_to_do(
    log, options, why
):
    with pytest.raises(ReplayError, match=why):
        await play(Foreign(key="right"), log(SESSION), **options)


async def test_an_endpoint_without_a_list_of_models_is_used_with_a_model_named(log):
    report = await play(Foreign(), log(SESSION), path="/bare/chat/completions", model=MODEL)
    assert report.incomplete == []
    assert report.run.url.endswith("/bare")


async def test_nobody_there_is_one_line():
    endpoint = Endpoint("http://127.0.0.1:9/v1", None, None, {})
    with pytest.raises(ReplayError, match=r"no answer from http://127\.0\.0\.1:9/v1"):
        await replay_chat(generate(Workload()), endpoint, ReplaySettings(), Silent())


async def test_a_password_in_the_address_is_in_no_report(log):
    foreign = Foreign()
    with serving(foreign.app) as port:
        endpoint = Endpoint(f"http://me:secret@127.0.0.1:{port}/v1", None, None, {})
        report = await replay_chat(log(SESSION), endpoint, ReplaySettings(), Silent())
    assert b"secret" not in report.to_json()


async def test_free_answers_are_refused_because_the_history_would_differ():
    scenario = Scenario(
        format=FORMAT, name="n", description="d", turns=[ScenarioTurn(user="go", free=True)]
    )
    endpoint = Endpoint("http://127.0.0.1:9/v1", None, None, {})
    for scenarios, settings in (
        ([scenario], ReplaySettings()),
        (generate(Workload()), ReplaySettings(free=True)),
    ):
        with pytest.raises(ReplayError, match="none may be free"):
            await replay_chat(scenarios, endpoint, settings, Silent())


def test_the_command_says_what_it_found_and_what_it_measured(tmp_path):
    path = write(tmp_path / "log.jsonl", {"messages": SESSION, "tool_seconds": [0.01]})
    text = io.StringIO()
    with serving(Foreign().app) as port:
        options = ReplayOptions(
            file=path,
            dialect="chat",
            url=f"http://127.0.0.1:{port}/v1",
            extra='{"ignore_eos": true}',
            json_path=tmp_path / "out.json",
        )
        run_replay(options, Console(file=text, width=200))
    shown = text.getvalue()
    assert "OpenAI messages, a session per line, 1 session, 3 turns, 0 s of tool waits" in shown
    assert shown.splitlines()[-1] == "turns: 3"
    assert "did less work" not in shown
    saved = json.loads((tmp_path / "out.json").read_bytes())
    assert saved["run"]["dialect"] == "chat"
    assert saved["totals"]["turns"] == 3


def test_an_endpoint_that_ends_its_answers_itself_is_said_to_have_done_less(tmp_path):
    path = write(tmp_path / "log.jsonl", {"messages": [user("go"), assistant("word " * 50)]})
    text = io.StringIO()
    with serving(Foreign().app) as port:
        url = f"http://127.0.0.1:{port}/v1"
        run_replay(ReplayOptions(file=path, dialect="chat", url=url), Console(file=text, width=300))
    assert "The endpoint made 8 tokens of 63 asked for" in text.getvalue()
    assert "ignore_eos" in text.getvalue()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "needs the --url"),
        ({"url": "ftp://x"}, "is no address"),
        ({"url": "http://127.0.0.1:9", "extra": "{"}, "--extra is no JSON object"),
        ({"url": "http://127.0.0.1:9", "extra": "[1]"}, "--extra is no JSON object"),
        ({"dialect": "session", "extra": "{}"}, "--extra and --lengths are of --dialect chat"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        run_replay(
            ReplayOptions(**{"dialect": "chat", "workload": "turns=2"} | options),
            Console(file=io.StringIO()),
        )
