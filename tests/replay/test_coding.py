"""The committed coding story, without any model: its tools really run."""

import asyncio
from pathlib import Path

import pytest
from agentserve_tools import Toolbox, ToolOutput

from agentserve.replay.scenario import Scenario, load_scenario
from agentserve.replay.tools import StoryTools
from agentserve.replay.workspace import Workspace

STORY = Path(__file__).parents[2] / "scenarios" / "coding.toml"


async def rehearse(scenario: Scenario) -> list[list[ToolOutput]]:
    with Workspace(scenario.files) as workspace:
        tools = StoryTools(scenario, workspace)
        return [await tools.scripted(turn.calls) for turn in scenario.turns]


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load_scenario(STORY)


@pytest.fixture(scope="module")
def results(scenario) -> list[list[ToolOutput]]:
    return asyncio.run(rehearse(scenario))


def test_it_has_a_hundred_forced_turns_and_several_parallel_calls(scenario):
    assert len(scenario.turns) == 100
    assert not any(turn.free for turn in scenario.turns)
    assert sum(len(turn.calls) > 1 for turn in scenario.turns) >= 3
    assert sum(turn.user is not None for turn in scenario.turns) == 4


def test_every_forced_call_fits_the_signature_of_the_tool_that_runs_it(scenario):
    with Workspace({}) as workspace:
        toolbox = Toolbox(workspace.tools().values())
    for tool in scenario.tools:
        toolbox[tool.name].signature.bind(tool.example)
    for turn in scenario.turns:
        for call in turn.calls:
            toolbox[call.name].signature.bind(call.arguments)


def test_the_checks_fail_at_first_and_all_pass_in_the_end(scenario, results):
    runs = [
        output.output
        for turn, outputs in zip(scenario.turns, results, strict=True)
        for call, output in zip(turn.calls, outputs, strict=True)
        if call.name == "run" and not call.arguments
    ]
    assert runs[0].startswith("failed: parse, show, tax,")
    assert runs[-1] == "ok: 16 passed"


def test_three_calls_go_wrong_and_the_story_recovers(results):
    errors = [output.output for outputs in results for output in outputs if output.is_error]
    assert len(errors) == 3
    assert "found 0 times in money.py" in errors[0]
    assert "found 2 times in stock.py" in errors[1]
    assert "no such file: order.py" in errors[2]


def test_two_runs_give_the_same_results_and_none_names_the_directory(scenario, results):
    texts = [[output.output for output in outputs] for outputs in results]
    again = asyncio.run(rehearse(scenario))
    assert [[output.output for output in outputs] for outputs in again] == texts
    assert not any("agentserve-replay" in text for outputs in texts for text in outputs)
