"""Logs replayed on agentserve's own API, and both dialects compared: real servers, no weights."""

import json
from pathlib import Path

import pytest
from foreign_endpoint import Foreign
from live_server import serving
from log_lines import SESSION, assistant, call, tool, user, write
from served import served

from agentserve.cli import main
from agentserve.config import ServerSettings
from agentserve.replay.logged import Limits
from agentserve.replay.logs import load_log
from agentserve.replay.report import Report, TurnRecord
from agentserve.replay.runner import ReplaySettings, replay
from agentserve.replay.scenario import FORMAT, Said, Scenario, ScenarioTurn

TRACES = Path(__file__).parents[3] / "shared" / "traces"


class Silent:
    """Shows nothing."""

    def heard(self, user: str) -> None: ...

    def turn(self, record: TurnRecord) -> None: ...


@pytest.fixture(scope="module")
def url():
    with served(ServerSettings(allow_force=True), max_context=8192, num_blocks=4096) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture
def run(capsys):
    """Run a command line; return exit code, stdout, stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return call


@pytest.fixture
def stories(tmp_path):
    """Return a function from the messages of a session to its stories."""

    def read(messages):
        return load_log(write(tmp_path / "log.jsonl", {"messages": messages}), Limits()).scenarios

    return read


async def play(url: str, *scenarios: Scenario) -> Report:
    return await replay(list(scenarios), url, ReplaySettings(speed=float("inf")), Silent())


async def test_a_log_is_lived_through_with_its_own_answers_and_new_tokens_only(url, tmp_path):
    log = load_log(write(tmp_path / "log.jsonl", {"messages": SESSION}), Limits())
    report = await play(url, *log.scenarios)
    assert report.incomplete == []
    assert [record.action for record in report.records] == [
        'bash("ls")',
        "Only main.py is here.",
        "Good luck with it.",
    ]
    for record in report.records:
        assert record.prefill_computed == record.new_tokens


async def test_messages_of_every_role_are_fed_in_front_of_a_turn(url, stories):
    messages = [
        {"role": "system", "content": "s"},
        assistant("Hello, I am here."),
        user("one"),
        user("two"),
        assistant(None, call("a"), call("b", "look", "{}")),
        tool("b", "seen"),
        tool("a", ""),
        {"role": "system", "content": "be brief"},
        assistant("ok"),
    ]
    report = await play(url, *stories(messages))
    assert report.incomplete == []
    assert report.totals().turns == 2


async def test_after_a_reset_the_session_holds_only_what_is_said_since(url):
    turns = [
        ScenarioTurn(said=[Said("user", "word " * 300)], text="one"),
        ScenarioTurn(said=[Said("user", "summary")], reset=True, text="two"),
        ScenarioTurn(said=[Said("user", "more")], text="three"),
    ]
    report = await play(
        url, Scenario(format=FORMAT, name="n", description="d", system="s", turns=turns)
    )
    assert report.incomplete == []
    first, second, third = [record.input_tokens for record in report.records]
    assert first > 300 > third > second


async def test_an_answer_longer_than_the_servers_default_is_not_cut(url, stories):
    report = await play(url, *stories([user("go"), assistant("a b " * 900)]))
    assert report.incomplete == []
    assert report.records[0].output_tokens > 1024


async def test_a_session_that_the_server_reads_otherwise_ends_early_and_the_others_go_on(
    url, stories
):
    looks_like_a_call = '{"name": "bash", "arguments": {"command": "rm"}}'
    odd = [user("go"), assistant("first", call("a")), tool("a"), assistant(looks_like_a_call)]
    report = await play(url, *stories(odd), *stories(SESSION))
    (failure,) = report.incomplete
    assert failure.startswith("session 1, turn 2: the server made")
    assert len(report.records) == 1 + 3


@pytest.mark.skipif(not TRACES.exists(), reason="no traces beside this checkout")
@pytest.mark.parametrize("source", ["openhands", "tau2-es", "toolbench"])
async def test_real_sessions_are_lived_through(url, source):
    log = load_log(TRACES / f"{source}.jsonl.gz", Limits(turns=4))
    report = await play(url, *log.scenarios[:2])
    for why in report.incomplete:  # a long one may fill the context; nothing else may happen
        assert "context_full" in why
    assert len(report.records) >= 2


def test_the_dialects_are_compared_and_other_work_is_refused(url, run, tmp_path):
    log = write(tmp_path / "log.jsonl", {"messages": SESSION})
    ours, theirs, other = (tmp_path / f"{name}.json" for name in ("ours", "theirs", "other"))
    with serving(Foreign(counts="no cache").app) as port:
        assert run("replay", log, "--url", url, "--json", ours)[0] == 0
        chat = ("--dialect", "chat", "--url", f"http://127.0.0.1:{port}/v1", "--lengths", ours)
        assert run("replay", log, *chat, "--json", theirs)[0] == 0
        assert run("replay", log, *chat, "--turns", 2, "--speed", 2, "--json", other)[0] == 0

    code, out, _ = run("report", ours, theirs)
    assert code == 0
    rows = {line[:24].strip(): line[24:].split() for line in out.splitlines()}
    for name in ("makespan", "TTFT p50", "TTFT p95", "turn p50", "turn p95", "output tokens/s"):
        assert float(rows[name][-1]) > 0
    assert "not reported" in out
    assert "chat dialect" in out
    assert "Careful: the outputs are of other lengths" in out

    code, out, err = run("report", ours, other)
    assert (code, out) == (1, "")
    assert "they played other workloads (1 sessions, 3 turns and 1 sessions, 2 turns)" in err
    assert "at speed 1 and 2" in err

    code, out, _ = run("report", ours, other, "--anyway", "--json")
    assert code == 0
    document = json.loads(out)
    figures = {row["name"]: row for row in document["rows"]}
    assert figures["turns"]["ratio"] == pytest.approx(2 / 3)
    assert len(document["differ"]) == 3

    asked = [turn["asked_tokens"] for turn in json.loads(theirs.read_bytes())["turns"]]
    made = [turn["output_tokens"] for turn in json.loads(ours.read_bytes())["turns"]]
    assert asked == made
