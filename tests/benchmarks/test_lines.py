"""The arithmetic of overhead and history: slopes, stamps, residuals."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OWN = ("least_squares", "overhead", "history", "floor")


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The modules beside the benchmark can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.startswith(OWN)]:
        del sys.modules[name]


def test_points_on_a_line_give_it_back_without_error():
    from least_squares import fit_line

    line = fit_line([1.0, 2.0, 5.0], [5.0, 7.0, 13.0])
    assert (line.intercept, line.slope) == pytest.approx((3.0, 2.0))
    assert line.slope_error == pytest.approx(0.0, abs=1e-9)
    assert line.at(10.0) == pytest.approx(23.0)


def test_the_slopes_error_is_that_of_the_textbook():
    from least_squares import fit_line

    line = fit_line([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 2.0])
    assert line.slope == pytest.approx(0.6)
    assert line.intercept == pytest.approx(0.1)
    # residuals -0.1, 0.3, -0.3, 0.1: 0.2 over 2 degrees of freedom, over a spread of 5
    assert line.slope_error == pytest.approx((0.2 / 2 / 5) ** 0.5)


def test_a_slope_is_found_in_large_numbers():
    from least_squares import fit_line

    xs = [1e9 + x for x in range(5)]
    assert fit_line(xs, [x / 4 for x in xs]).slope == pytest.approx(0.25)


@pytest.mark.parametrize("xs", [[1.0, 2.0], [3.0, 3.0, 3.0]])
def test_too_few_points_are_refused(xs):
    from least_squares import fit_line

    with pytest.raises(ValueError, match="3 points"):
        fit_line(xs, [1.0] * len(xs))


def test_the_overhead_leaves_out_the_first_step_and_what_lies_between_the_tokens():
    from overhead import sample_of
    from overhead_engine import StepTimes
    from overhead_server import Stamps

    steps = StepTimes(first_launch=10.002, first_collected=10.003, last_collected=10.020)
    stamps = Stamps(called=9.999, received=10.0, first_event=10.005, last_byte=10.024, steps=steps)
    sample = sample_of(100, 97, stamps)
    assert sample.submitting == pytest.approx(2.0)
    assert sample.answering == pytest.approx(2.0)
    assert sample.ending == pytest.approx(4.0)
    assert sample.overhead == pytest.approx(8.0)
    assert sample.reading == pytest.approx(1.0)
    assert sample.streaming == pytest.approx(17.0)


def test_another_process_reads_the_step_times_until_they_are_reset(tmp_path):
    from overhead_engine import SharedClock, StepTimes

    writer, reader = SharedClock(tmp_path / "clock"), SharedClock(tmp_path / "clock")
    writer.step(1.0, 2.0)
    writer.step(3.0, 4.0)
    assert reader.read() == StepTimes(1.0, 2.0, 4.0)
    reader.reset(0.25)
    assert writer.step_s == 0.25
    writer.step(5.0, 6.0)
    assert reader.read() == StepTimes(5.0, 6.0, 6.0)
    assert writer.step_s == 0.25


def test_growth_that_attention_explains_leaves_no_residual():
    from history import verdict

    contexts = [100.0 * n for n in range(1, 101)]
    found = verdict(contexts, [0.2 + 2e-5 * context for context in contexts], 2e-5)
    assert found.growth_s == pytest.approx(2e-5 * 9000)  # medians of ten at each end
    assert found.residual_s == pytest.approx(0.0, abs=1e-12)
    assert found.slope_s == pytest.approx(2e-5)


def test_growth_beyond_what_attention_explains_is_the_residual():
    from history import verdict

    contexts = [100.0 * n for n in range(1, 101)]
    found = verdict(contexts, [0.1 + 3e-5 * context for context in contexts], 2e-5)
    assert found.explained_s == pytest.approx(0.18)
    assert found.residual_s == pytest.approx(0.09)
    assert found.residual_of_first == pytest.approx(0.09 / (0.1 + 3e-5 * 550))


def test_rounds_are_joined_turn_by_turn_without_the_prompt():
    from history import medians

    from agentserve.replay.report import TurnRecord

    def record(index, latency):
        return TurnRecord(1, index, "", 100 * index, 50, 100 * index - 50, 20, latency / 2, latency)

    rounds = [[record(1, 9.0), record(2, x), record(3, 2 * x)] for x in (1.0, 3.0, 2.0)]
    first, second = medians(rounds)
    assert (first.number, first.context, first.new, first.output) == (1, 200, 50, 20)
    assert (first.turn_s, first.ttft_s) == (2.0, 1.0)
    assert (second.number, second.turn_s) == (2, 4.0)
