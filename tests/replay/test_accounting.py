"""The arithmetic of reuse, counted on the real engine."""

import io

import pytest
from rich.console import Console

from agentserve.replay.accounting import Accounting, account
from agentserve.replay.command import ReplayOptions, run_replay


@pytest.mark.parametrize(("turns", "without", "with_session"), [(10, 55, 10), (100, 5050, 100)])
def test_a_session_computes_each_turn_once(turns, without, with_session):
    assert account(turns) == Accounting(turns, without, with_session)


def test_the_command_prints_both_lengths():
    text = io.StringIO()
    run_replay(ReplayOptions(accounting=True), Console(file=text, width=80))
    rows = [line.replace("│", " ").split() for line in text.getvalue().splitlines()]
    assert ["10", "55", "10"] in rows
    assert ["100", "5,050", "100"] in rows
