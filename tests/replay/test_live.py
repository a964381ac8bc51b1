"""Replays against a real server on the hash oracle: HTTP, sessions, engine, tools; no weights."""

from pathlib import Path

import msgspec
import pytest
from served import served

from agentserve.config import ServerSettings
from agentserve.replay.generator import Workload, generate
from agentserve.replay.report import Report, TurnRecord
from agentserve.replay.runner import ReplayError, ReplaySettings, replay
from agentserve.replay.scenario import Scenario, load_scenario

STORY = Path(__file__).parents[2] / "scenarios" / "coding.toml"
TURNS = 12


class Watcher:
    """Remembers what a person would have been shown."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.turns: list[TurnRecord] = []

    def heard(self, user: str) -> None:
        self.said.append(user)

    def turn(self, record: TurnRecord) -> None:
        self.turns.append(record)


@pytest.fixture(scope="module")
def url():
    with served(ServerSettings(allow_force=True)) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def story() -> Scenario:
    scenario = load_scenario(STORY)
    return msgspec.structs.replace(scenario, turns=scenario.turns[:TURNS])


async def play(url: str, *scenarios: Scenario, **settings) -> tuple[Report, Watcher]:
    watcher = Watcher()
    fast = ReplaySettings(speed=float("inf"), **settings)
    return await replay(list(scenarios), url, fast, watcher), watcher


async def test_every_turn_computes_its_new_tokens_and_no_other(url, story):
    report, watcher = await play(url, story)
    assert report.incomplete == []
    assert len(report.records) == TURNS
    assert watcher.turns == report.records
    assert watcher.said == [story.turns[0].user]
    for record in report.records:
        assert record.prefill_computed == record.new_tokens
        assert 0 < record.ttft_s <= record.latency_s
    assert report.records[0].action.startswith("list_files(")
    grown = [record.cached_tokens for record in report.records]
    assert grown == sorted(grown)
    assert grown[-1] > 400


async def test_sessions_run_side_by_side_in_workspaces_of_their_own(url, story):
    report, _ = await play(url, story, story)
    assert report.incomplete == []
    assert sorted((record.session, record.index) for record in report.records) == [
        (session, index) for session in (1, 2) for index in range(1, TURNS + 1)
    ]
    by_session = [
        [record.new_tokens for record in report.records if record.session == session]
        for session in (1, 2)
    ]
    assert by_session[0] == by_session[1]


async def test_a_generated_workload_is_replayed_too(url):
    scenarios = generate(Workload(sessions=3, turns=4, prompt=60, new=20, output=24, gap=0.01))
    report, _ = await play(url, *scenarios)
    assert report.totals().turns == 12
    for record in report.records:
        if record.index == 1:  # the shared prompt may be there already
            assert record.prefill_computed <= record.new_tokens
        else:
            assert record.prefill_computed == record.new_tokens


async def test_a_model_left_to_itself_still_gets_to_the_end_of_the_story(url, story):
    report, _ = await play(url, msgspec.structs.replace(story, turns=story.turns[:4]), free=True)
    assert len(report.records) == 4
    assert all(record.output_tokens <= 64 for record in report.records)


async def test_a_session_that_fills_its_context_ends_early_and_says_why(url, story):
    long = msgspec.structs.replace(story, system="word " * 1900)
    with pytest.raises(ReplayError, match="session 1, turn 1: context_full"):
        await play(url, long)


async def test_a_server_that_takes_no_forced_output_is_told_apart(story):
    with (
        served(ServerSettings()) as server,
        pytest.raises(ReplayError, match="--allow-force, or replay with --free"),
    ):
        await play(f"http://127.0.0.1:{server.port}", story)
