"""The command around a replay: its options, its own server, what a person is shown."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentserve.replay.command import ReplayOptions, run_replay
from agentserve.replay.display import Display
from agentserve.replay.report import TurnRecord
from agentserve.replay.server import ServerFailed, own_server


def record(index: int, session: int = 1) -> TurnRecord:
    before = 100 * (index - 1)
    return TurnRecord(session, index, "look()", before + 60, 60, before, 40, 0.5, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        ReplayOptions(),
        ReplayOptions(file=Path("a.toml"), workload="turns=2"),
        ReplayOptions(workload="turns=none"),
        ReplayOptions(file=Path("none.toml")),
        ReplayOptions(workload="turns=2", speed=0.0),
        ReplayOptions(workload="turns=2", sessions=0),
    ],
)
def test_options_that_make_no_sense_are_refused_before_a_server_is_started(options):
    with pytest.raises(ValueError, match=r"\w"):
        run_replay(options, Console(file=io.StringIO()))


def test_a_server_that_cannot_start_says_why():
    refused = pytest.raises(ServerFailed, match=r"(?s)before it was ready: .*no-such-model")
    with refused, own_server("no-such-model.gguf"):
        raise AssertionError("it started")


def test_without_a_terminal_every_turn_is_a_line():
    text = io.StringIO()
    with Display(Console(file=text, width=40), turns=2) as display:
        display.heard("Fix [it] please, and be so kind as to do it soon.")
        display.turn(record(1))
        display.turn(record(2))
    assert text.getvalue().splitlines() == [
        "user: Fix [it] please, and be so kind as to do it soon.",
        "turn   1/2 look(): 60 computed, 0 cached, 1.00 s",
        "turn   2/2 look(): 60 computed, 100 cached, 1.00 s",
    ]


def test_a_line_of_several_sessions_names_the_session_and_its_turn():
    text = io.StringIO()
    with Display(Console(file=text, width=80), turns=4, sessions=2) as display:
        display.turn(record(2, session=2))
    line = "  1/4 session 2, turn 2: look(): 60 computed, 100 cached, 1.00 s"
    assert text.getvalue().splitlines() == [line]


def test_on_a_terminal_a_bar_shows_the_place_and_the_call():
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True)
    with Display(console, turns=2, sessions=2) as display:
        display.turn(record(1, session=2))
    assert "1/2" in text.getvalue()
    assert "session 2, turn 1: look()" in text.getvalue()
