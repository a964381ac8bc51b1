"""Depth 1: the next step is launched before the result of the one in flight is known."""

import pytest
from engine_driver import Driver, RecordingRunner, alone
from overlap import OUTPUT, PROMPT, STOP, ahead, assert_nothing_is_left, ends, rows_of

from agentserve.config import EngineSettings
from agentserve.engine.messages import Cancel, Close, Fork
from agentserve.engine.plan import SAMPLED, unpack


class Calls(RecordingRunner):
    """Writes down the order of its calls."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def launch(self, plan):
        self.calls.append(f"launch {plan.step}")
        return super().launch(plan)

    def sample(self, handle, masks):
        self.calls.append(f"sample {handle.plan.step}")
        super().sample(handle, masks)

    def collect(self, handle):
        self.calls.append(f"collect {handle.plan.step}")
        return super().collect(handle)


# The order of calls, and what plans say


def test_a_step_is_launched_before_the_one_in_flight_is_collected():
    d = ahead(runner=Calls)
    d.run(1, PROMPT, max_tokens=3)
    assert ", ".join(d.runner.calls) == (
        "launch 1, sample 1, launch 2, collect 1, sample 2, launch 3, collect 2, sample 3, "
        "collect 3"
    )


def test_at_depth_0_nothing_is_in_flight_when_a_step_is_launched():
    d = Driver(runner=Calls)
    d.run(1, PROMPT, max_tokens=2)
    assert (
        ", ".join(d.runner.calls) == "launch 1, sample 1, collect 1, launch 2, sample 2, collect 2"
    )


def test_a_step_without_rows_is_not_left_in_flight():
    d = ahead(runner=Calls, num_blocks=12, host_blocks=64)
    d.submit(1, PROMPT)
    without = 0
    while d.engine.busy:
        d.step()
        last = d.runner.plans[-1]
        if not last.rows:
            without += 1
            assert d.runner.calls[-1] == f"collect {last.step}"
    assert without


def test_a_sampled_token_is_not_known_when_its_row_is_planned_and_a_forced_one_is():
    d = ahead()
    turn = d.run(1, PROMPT, max_tokens=5, force=[250, 251])
    assert [list(unpack(plan.tokens)) for plan in d.runner.plans[1:]] == [
        [250],
        [251],
        [SAMPLED],
        [SAMPLED],
    ]
    assert d.output[turn] == [250, 251, *alone([*PROMPT, 250, 251], 3)]


# How turns end


@pytest.mark.parametrize("length", [17, 18, 19, 20])
def test_a_stop_is_seen_one_step_late_and_leaks_nothing(length):
    prompt = PROMPT[:length]
    expected = alone(prompt, 40)
    place = next(n for n in range(5, 40) if expected[n] not in expected[:n])
    d = ahead()
    turn = d.run(1, prompt, max_tokens=30, stop_ids=[expected[place]])
    end = d.finished[turn]
    log = prompt + expected[:place]
    assert (d.output[turn], end.stop_id) == (expected[:place], expected[place])
    assert end.log_length == end.kv_length == len(log)
    assert rows_of(d) == len(log) + 1
    stats = d.engine.stats()
    assert stats.discarded_tokens == 1
    assert stats.prefill_tokens + stats.decode_tokens == stats.tokens_in_kv == len(log)
    assert_nothing_is_left(d)
    # The row that came too late had the stop token as its input: nobody finds that.
    after = d.run(2, [*log, expected[place], 9, 9, 9, 9], max_tokens=3)
    assert d.started[after].cached <= len(log)
    assert d.output[after] == alone([*log, expected[place], 9, 9, 9, 9], 3)


def test_the_next_turn_can_come_while_the_late_row_is_in_flight():
    d = ahead()
    first = d.submit(1, PROMPT, max_tokens=30, stop_ids=[OUTPUT[STOP]])
    d.finish(first)
    assert d.engine.busy  # the late row
    log = PROMPT + OUTPUT[:STOP]
    second = d.submit(1, [7, 8], keep=len(log), max_tokens=9)
    d.drain()
    assert d.started[second].cached == len(log)
    assert d.output[second] == alone([*log, 7, 8], 9)
    assert_nothing_is_left(d)


def test_a_next_turn_that_cuts_the_log_can_come_while_the_late_row_is_in_flight():
    d = ahead()
    d.finish(d.submit(1, PROMPT, max_tokens=30, stop_ids=[OUTPUT[STOP]]))
    second = d.submit(1, [7, 8], keep=22, max_tokens=9)
    d.drain()
    assert d.started[second].cached == 22
    assert d.output[second] == alone([*PROMPT, *OUTPUT[:2], 7, 8], 9)


@pytest.mark.parametrize(
    ("options", "turn"),
    [
        ({}, {"max_tokens": 7}),
        ({}, {"max_tokens": 1}),
        ({}, {"max_tokens": 0}),
        ({"max_context": 26}, {"max_tokens": 30}),
        ({"num_blocks": 6}, {"max_tokens": 30}),
        ({}, {"max_tokens": 30, "force": [250, 251, 3], "stop_ids": [3]}),
    ],
)
def test_an_end_that_is_known_ahead_costs_no_row(options, turn):
    now, late = Driver(**{"block_size": 4, **options}), ahead(**options)
    for d in (now, late):
        d.run(1, PROMPT, **turn)
        assert_nothing_is_left(d)
    assert ends(now) == ends(late)
    assert rows_of(now) == rows_of(late)
    assert late.engine.stats().discarded_tokens == 0


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_a_turn_can_be_cancelled_under_a_row_in_flight(steps):
    d = ahead()
    turn = d.submit(1, PROMPT, max_tokens=30)
    for _ in range(steps):
        d.step()
    d.engine.apply(Cancel(turn))
    given = d.output[turn].copy()
    d.drain()
    assert d.output[turn] == given == OUTPUT[: steps - 1]
    end = d.finished[turn]
    assert (end.reason, end.log_length) == ("cancelled", 20 + len(given))
    assert end.kv_length <= end.log_length
    assert_nothing_is_left(d)
    after = d.run(1, [9], keep=end.log_length, max_tokens=4)
    assert d.started[after].cached == end.kv_length
    assert d.output[after] == alone([*PROMPT, *given, 9], 4)


def test_a_prefill_can_be_cancelled_between_two_chunks():
    d = ahead(settings=EngineSettings(token_budget=8, check_invariants=True))
    turn = d.submit(1, PROMPT, max_tokens=3)
    d.step()
    d.step()
    d.engine.apply(Cancel(turn))
    d.drain()
    assert d.finished[turn].kv_length == 8  # of 16 that were launched
    assert d.engine.stats().discarded_tokens == 8
    after = d.run(1, [], keep=20, max_tokens=3)
    assert d.started[after].cached == 8
    assert d.output[after] == alone(PROMPT, 3)


def test_blocks_of_a_closed_sequence_go_to_others_under_its_row_in_flight():
    d = ahead(num_blocks=6)
    turn = d.submit(1, PROMPT, max_tokens=4)
    d.step()
    d.step()
    d.engine.apply(Close(1))
    other = [99 - n for n in range(20)]
    second = d.submit(2, other, max_tokens=4)  # needs every block
    again = d.submit(1, PROMPT[:3], generation=2, max_tokens=4)
    d.drain()
    assert d.finished[turn].reason == "cancelled"
    assert d.output[second] == alone(other, 4)
    assert d.output[again] == alone(PROMPT[:3], 4)
    assert_nothing_is_left(d)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("keep", [24, 23, 22, 7, 0])
def test_a_fork_under_a_row_in_flight_takes_what_is_committed(keep, closes):
    d = ahead()
    turn = d.submit(1, PROMPT, max_tokens=12)
    for _ in range(5):
        d.step()
    assert d.output[turn] == OUTPUT[:4]
    d.engine.apply(Fork(1, 1, 2, 1, keep))
    if closes:
        d.engine.apply(Close(1))
    d.drain()
    assert d.output[turn] == OUTPUT[: 4 if closes else 12]
    log = [*PROMPT, *OUTPUT][:keep]
    second = d.run(2, [2], keep=keep, max_tokens=4)
    assert d.output[second] == alone([*log, 2], 4)
    assert_nothing_is_left(d)
