"""Real agents' sessions, where they are at hand, become stories that hold together."""

from pathlib import Path

import pytest

from agentserve.replay.logged import Limits
from agentserve.replay.logs import load_log
from agentserve.replay.scenario import check

TRACES = sorted((Path(__file__).parents[3] / "shared" / "traces").glob("*.jsonl.gz"))
pytestmark = pytest.mark.skipif(not TRACES, reason="no traces beside this checkout")


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_session_of_a_source_is_a_story(path):
    log = load_log(path, Limits())
    assert log.format.startswith("OpenAI messages, a session per line")
    for scenario in log.scenarios:
        check(scenario)
        assert all(0 <= scenario.tool_seconds(turn) <= 60 for turn in scenario.turns)
