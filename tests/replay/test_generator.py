"""Generated workloads: sizes, seeds, and what is refused."""

import statistics

import pytest

from agentserve.replay.generator import Workload, generate, parse_workload
from agentserve.replay.scenario import check


def test_a_seed_decides_everything():
    workload = Workload(sessions=3, turns=5, seed=7)
    assert generate(workload) == generate(workload)
    assert generate(workload) != generate(Workload(sessions=3, turns=5, seed=8))


def test_more_sessions_leave_the_earlier_ones_as_they_were():
    assert generate(Workload(sessions=4, turns=3))[:2] == generate(Workload(sessions=2, turns=3))


def test_sessions_share_their_prompt_and_nothing_else():
    first, second = generate(Workload(sessions=2, turns=4, prompt=50))
    assert first.system == second.system
    assert first.turns != second.turns


def test_every_session_is_a_story_that_holds_together():
    for scenario in generate(Workload(sessions=2, turns=6)):
        check(scenario)
        assert len(scenario.turns) == 6
    check(generate(Workload(sessions=1, turns=1))[0])


def test_sizes_are_what_was_asked_for():
    (scenario,) = generate(Workload(sessions=1, turns=3, prompt=40, new=30, output=20))
    assert len(scenario.system.split()) == 40
    assert len((scenario.turns[0].user or "").split()) == 30
    assert [len((turn.calls[0].result or "").split()) for turn in scenario.turns[:2]] == [30, 30]
    assert len(scenario.turns[2].text.split()) == 20


def test_the_first_message_can_have_a_size_of_its_own():
    for turns in (1, 2):
        (scenario,) = generate(Workload(sessions=1, turns=turns, prompt=4, new=5, first=30))
        assert len((scenario.turns[0].user or "").split()) == 30


def test_gaps_are_exponential_around_their_mean():
    scenarios = generate(Workload(sessions=50, turns=41, prompt=1, new=1, gap=2.0))
    gaps = [turn.tool_seconds for scenario in scenarios for turn in scenario.turns[:-1]]
    assert statistics.mean(gaps) == pytest.approx(2.0, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(2.0, rel=0.1)


def test_a_workload_is_read_from_one_option():
    assert parse_workload("sessions=16,gap=0.5,seed=3") == Workload(sessions=16, gap=0.5, seed=3)


@pytest.mark.parametrize(
    "text", ["sessions=many", "agents=3", "turns=0", "output=15", "gap=-1", "first=-1", "turns"]
)
def test_a_workload_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match="workload: "):
        parse_workload(text)
