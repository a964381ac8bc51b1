"""KV that comes back to the device: nobody else waits, and what is announced comes early."""

import pytest
from engine_driver import Driver, alone
from two_tiers import PROMPT, offloaded, with_host

from agentserve.engine.messages import Cancel, Close, Tokens
from agentserve.kv.copies import OVERDUE_S

# Loading


def test_others_get_tokens_in_every_step_while_one_session_loads():
    d, log = offloaded(num_blocks=40)
    other = d.submit(2, PROMPT[::-1], max_tokens=60)
    d.step()
    d.runner.held = {"load"}
    turn = d.submit(1, [7], keep=24)
    for _ in range(20):
        got = {event.turn for event in d.step() if isinstance(event, Tokens)}
        assert got == {other}
        assert d.engine.stats().loading == 1
    d.runner.held = set()
    d.drain()
    assert d.output[turn] == alone([*log, 7], 4)
    assert d.output[other] == alone(PROMPT[::-1], 60)
    assert d.started[turn].host == 23
    assert d.finished[turn].restore_s == pytest.approx(0.21)
    assert d.engine.stats().stall_s == pytest.approx(0.21)


def test_loads_are_issued_in_token_order():
    d, _ = offloaded()
    d.run(1, [7], keep=24)
    plan = next(p for p in d.runner.plans if any(c.kind == "load" for c in p.copies))
    loads = [c for c in plan.copies if c.kind == "load"]
    assert [c.target for c in loads] == plan.appended[0].blocks[:6]
    assert [c.tokens for c in loads] == [4, 4, 4, 4, 4, 3]


def test_saves_are_few_in_flight_and_none_begins_while_a_load_is_in_flight():
    d = with_host(num_blocks=120, host_blocks=120)
    d.run(1, PROMPT)
    d.offload(1)
    d.runner.held = {"save", "load"}
    d.submit(2, [5] * 200)
    d.step_until(lambda: len(d.finished) == 2)
    d.advance()
    saves = d.engine.stats().copies_in_flight
    assert 0 < saves <= 16
    d.submit(1, [7], keep=24)
    d.advance()
    d.runner.held = {"load"}
    for _ in range(5):
        d.advance()
    assert d.engine.stats().copies_in_flight == 6  # the loads alone
    d.runner.held = set()
    d.drain()
    assert d.where(2)[1] == 203


@pytest.mark.parametrize("way", ["cancel", "close", "replace"])
def test_a_turn_that_ends_while_it_loads_leaves_nothing_locked(way):
    d, log = offloaded(num_blocks=40)
    d.runner.held = {"load"}
    turn = d.submit(1, [7], keep=24)
    d.step()
    d.step()
    d.engine.apply(Close(1) if way == "close" else Cancel(turn))
    if way == "replace":
        again = d.submit(1, PROMPT[::-1], generation=2)
        d.finish(again)  # in blocks that the loads do not fill
        assert d.output[again] == alone(PROMPT[::-1], 4)
    else:
        d.step()
    assert d.finished[turn].reason == "cancelled"
    assert d.engine.stats().loading == 0
    assert d.engine.stats().copies_in_flight == 6
    d.runner.held = set()
    d.drain()
    stats = d.engine.stats()
    assert (stats.blocks_locked, stats.host_locked, stats.copies_in_flight) == (0, 0, 0)
    if way == "cancel":
        after = d.run(1, [7], keep=24)
        assert (d.started[after].cached, d.started[after].host) == (23, 0)
        assert d.output[after] == alone([*log, 7], 4)


def test_a_sequence_that_is_cancelled_and_comes_back_while_it_loads_waits_for_the_same_loads():
    d, log = offloaded(num_blocks=40)
    d.runner.held = {"load"}
    first = d.submit(1, [7], keep=24)
    d.step()
    d.engine.apply(Cancel(first))
    second = d.submit(1, [8], keep=24)
    for _ in range(3):
        d.step()
    assert d.engine.stats().copies_in_flight == 6
    assert d.engine.stats().loading == 1
    d.runner.held = set()
    d.drain()
    assert d.output[second] == alone([*log, 8], 4)


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_completion_that_got_lost_is_asked_for_again_after_30_seconds(kind):
    d, log = offloaded()
    d.runner.unreported = {kind}
    turn = d.submit(1, [7], keep=24)
    for _ in range(10):
        d.step()
    assert (turn in d.output) == (kind == "save")
    assert d.engine.stats().copies_in_flight > 0
    assert not any(plan.overdue for plan in d.runner.plans)
    d.step(OVERDUE_S)
    asked = [ticket for plan in d.runner.plans for ticket in plan.overdue]
    assert len(asked) == len(set(asked)) > 0
    d.runner.unreported = set()
    d.drain()
    assert d.output[turn] == alone([*log, 7], 4)
    assert d.where(1) == (28, 28)
    assert d.engine.stats().copies_in_flight == 0


# Promotion


def test_a_sequence_that_was_announced_has_nothing_to_load_when_its_turn_comes():
    for announced in (True, False):
        d, log = offloaded()
        if announced:
            d.promote(1)
            d.drain()
            assert d.where(1) == (23, 23)
        turn = d.run(1, [7], keep=24)
        assert d.started[turn].host == (0 if announced else 23)
        assert d.finished[turn].restore_s == 0 or not announced
        assert d.output[turn] == alone([*log, 7], 4)


def test_a_turn_that_comes_during_its_promotion_waits_for_what_is_left():
    d, log = offloaded()
    d.runner.held = {"load"}
    d.promote(1)
    d.step()
    turn = d.submit(1, [7], keep=24)
    for _ in range(3):
        d.step()
    assert d.engine.stats().copies_in_flight == 6
    d.runner.held = set()
    d.drain()
    assert d.output[turn] == alone([*log, 7], 4)
    assert sum(c.kind == "load" for p in d.runner.plans for c in p.copies) == 6


def test_promotion_takes_no_block_from_a_running_or_queued_turn():
    d, _ = offloaded(max_slots=1)
    d.run(2, PROMPT[::-1])
    running = d.submit(3, [3, *PROMPT], max_tokens=3)
    d.step()
    queued = d.submit(2, [1], keep=24)
    d.promote(1)
    d.step()
    assert d.where(1) == (0, 23)
    d.drain()
    assert (d.started[queued].lost, d.started[queued].host) == (0, 0)
    assert d.finished[running].preemptions == 0


def test_a_promotion_that_is_taken_back_copies_no_more():
    d = Driver(num_blocks=200, block_size=1, host_blocks=200)
    d.run(1, [5] * 99, max_tokens=1)
    d.offload(1)
    d.runner.held = {"load"}
    d.promote(1)
    d.step()
    d.promote(1, begin=False)
    d.runner.held = set()
    d.drain()
    assert d.where(1) == (64, 99)
