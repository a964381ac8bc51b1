"""KV that leaves the device between turns and comes back: exact, and without waiting for it."""

import random

import pytest
from engine_driver import Driver, alone

from agentserve.config import EngineSettings
from agentserve.engine.messages import Cancel, Close, Fork, Progress, Tokens
from agentserve.kv.copies import OVERDUE_S

PROMPT = list(range(20))  # with 4 tokens of output: 23 tokens of KV in 6 blocks of 4


def policy(name, **more):
    return EngineSettings(kv_policy=name, check_invariants=True, **more)


def with_host(**options):
    """Two sequences of PROMPT fit the device, all fit the host tier."""
    return Driver(**{"num_blocks": 12, "block_size": 4, "host_blocks": 64, **options})


def offloaded(sequence=1, **options):
    """A driver whose sequence has had one turn and is in the host tier only; and its log."""
    d = with_host(**options)
    log = PROMPT + d.output[d.run(sequence, PROMPT)]
    d.offload(sequence)
    assert d.where(sequence) == (0, 23)
    return d, log


# Exactness


def test_100_turns_that_are_offloaded_after_each_give_what_those_that_never_are_give():
    rng = random.Random(5)
    kept, moved = (Driver(num_blocks=260, block_size=4, host_blocks=n) for n in (0, 300))
    log: list[int] = []
    for _ in range(100):
        new = [rng.randrange(256) for _ in range(rng.randint(1, 8))]
        count = rng.randint(1, 8)
        turns = [d.run(1, new, keep=len(log), max_tokens=count) for d in (kept, moved)]
        (turn,) = set(turns)
        stayed, came_back = kept.started[turn], moved.started[turn]
        pending = 1 if log else 0  # the last token of a turn is logged and not computed
        assert stayed.computed == came_back.computed == len(new) + pending
        assert (stayed.host, came_back.host) == (0, came_back.cached)
        assert kept.output[turn] == moved.output[turn] == alone([*log, *new], count)
        log += [*new, *moved.output[turn]]
        moved.offload(1)
        assert moved.where(1) == (0, len(log) - 1)
    assert moved.engine.stats().lost == {}


def test_64_sessions_on_a_pool_that_holds_three_finish_all_turns_and_lose_nothing():
    d = Driver(num_blocks=24, block_size=8, host_blocks=700, max_slots=16)
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(20)]
    logs = {n: [] for n in range(64)}
    for round_ in range(3):
        new = {n: [rng.randrange(256) for _ in range(rng.randint(1, 20))] for n in logs}
        turns = {}
        for n, log in logs.items():
            first = shared if not round_ else []
            turns[n] = d.submit(n, [*first, *new[n]], keep=len(log), max_tokens=8)
            log += [*first, *new[n]]
        d.drain()
        for n, log in logs.items():
            assert d.output[turns[n]] == alone(log, 8)
            log += d.output[turns[n]]
    stats = d.engine.stats()
    assert stats.evictions > 64
    assert stats.lost == {}


def test_a_fork_of_an_offloaded_sequence_is_restored_from_the_blocks_that_both_share():
    d, log = offloaded()
    d.engine.apply(Fork(1, 1, 2, 1, 22))
    turn = d.run(2, [9], keep=22)
    assert d.output[turn] == alone([*log[:22], 9], 4)
    assert (d.started[turn].cached, d.started[turn].host) == (20, 20)
    after = d.run(1, [7], keep=24)
    assert d.output[after] == alone([*log, 7], 4)
    assert (d.started[after].cached, d.started[after].host) == (23, 3)  # the rest came with 2


def test_a_shared_block_is_saved_once():
    d = with_host(num_blocks=40)
    d.run(1, PROMPT)
    d.run(2, [*PROMPT, 99])
    first, second = d.inspect(1, 2)
    block = d.runner.info.groups[0].block_bytes
    assert (first.saved_bytes, second.saved_bytes) == (6 * block, 1 * block)  # five are shared
    assert (first.host, second.host) == (23, 24)


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


# What a turn is told


@pytest.mark.parametrize(
    ("name", "host_blocks", "host", "lost", "reason"),
    [
        ("none", 64, 0, 23, "policy"),
        ("device-lru", 64, 0, 23, "evicted"),
        ("lru+host", 0, 0, 23, "evicted"),
        ("lru+host", 2, 8, 15, "host_full"),
        ("lru+host", 64, 23, 0, ""),
        ("tool-aware", 0, 0, 23, "evicted"),
        ("tool-aware", 2, 8, 15, "host_full"),
        ("tool-aware", 64, 23, 0, ""),
    ],
)
def test_a_turn_whose_kv_had_to_go_is_told_where_it_went(name, host_blocks, host, lost, reason):
    d = with_host(host_blocks=host_blocks, settings=policy(name))
    log = PROMPT + d.output[d.run(1, PROMPT)]
    d.run(2, [9] * 44)
    turn = d.run(1, [7], keep=24)
    told = d.started[turn]
    assert (told.host, told.lost, told.reason) == (host, lost, reason)
    assert (told.cached, told.computed) == (23 - lost, lost + 2)
    assert d.output[turn] == alone([*log, 7], 4)
    assert d.engine.stats().lost.get(reason, 0) == lost


@pytest.mark.parametrize("name", ["none", "device-lru", "lru+host", "tool-aware"])
def test_a_turn_that_nobody_displaced_loses_nothing_unless_nothing_is_kept(name):
    d = with_host(settings=policy(name))
    d.run(1, PROMPT)
    turn = d.run(1, [7], keep=24)
    assert d.started[turn].lost == (23 if name == "none" else 0)
    assert d.started[turn].host == 0


def test_inspect_tells_where_the_kv_is_and_what_was_moved_for_it():
    d, _ = offloaded()
    block = d.runner.info.groups[0].block_bytes
    (before,) = d.inspect(1, 99)
    assert (before.sequence, before.tokens, before.device, before.host) == (1, 23, 0, 23)
    assert (before.saved_bytes, before.loaded_bytes, before.stall_s) == (6 * block, 0, 0.0)
    d.runner.held = {"load"}
    turn = d.submit(1, [7], keep=24)
    for _ in range(4):
        d.step()
    d.runner.held = set()
    d.drain()
    (after,) = d.inspect(1)
    assert (after.tokens, after.device, after.host) == (28, 28, 28)
    assert after.loaded_bytes == 6 * block
    assert after.saved_bytes == 6 * block + 2 * block  # its tail was written to; one block is new
    assert after.stall_s == d.finished[turn].restore_s == pytest.approx(0.05)
    stats = d.engine.stats()
    assert (stats.saved_bytes, stats.loaded_bytes) == (after.saved_bytes, after.loaded_bytes)


# Preemption


def two_that_do_not_fit(**options):
    d = Driver(num_blocks=12, block_size=4, **options)
    old = d.submit(1, PROMPT, max_tokens=26)
    young = d.submit(2, range(60, 76), max_tokens=26)
    d.drain()
    assert d.finished[old].preemptions == 0
    assert d.finished[young].preemptions > 0
    assert d.output[old] == alone(PROMPT, 26)
    assert d.output[young] == alone(range(60, 76), 26)
    return d.finished[young], d.engine.stats()


def test_preemption_demotes_while_the_host_has_room():
    young, stats = two_that_do_not_fit(host_blocks=40)
    assert young.recomputed == 0
    assert stats.lost == {}
    assert stats.loaded_bytes > 0


def test_preemption_drops_without_a_host_tier_and_says_what_that_cost():
    young, stats = two_that_do_not_fit()
    assert young.recomputed > 0
    assert stats.lost == {"preempted": young.recomputed}


# Background turns


def test_a_background_turn_pauses_while_others_run_and_then_goes_on():
    d = with_host(num_blocks=60, settings=policy("tool-aware", token_budget=16))
    ahead = list(range(100, 160))
    background = d.submit(1, ahead, max_tokens=0, background=True)
    for _ in range(4):
        d.step()
    (so_far,) = {e.done for e in d.events[-2:] if isinstance(e, Progress)}
    assert 0 < so_far < 60
    d.events.clear()
    other = d.submit(2, PROMPT, max_tokens=10)
    d.finish(other)
    assert not any(isinstance(e, Progress) and e.turn == background for e in d.events)
    d.drain()
    end = d.finished[background]
    assert (end.reason, end.kv_length, end.recomputed, end.preemptions) == ("prefilled", 60, 0, 0)
    after = d.run(1, [], keep=60)
    assert d.started[after].computed == 1
    assert d.output[after] == alone(ahead, 4)


def test_a_background_turn_ends_early_when_its_room_was_taken_and_keeps_what_it_has():
    d = with_host(settings=policy("tool-aware", token_budget=16))
    ahead = list(range(100, 140))
    background = d.submit(1, ahead, max_tokens=0, background=True)
    for _ in range(5):
        d.step()
    other = d.run(2, PROMPT)
    end = d.finished[background]
    assert (end.reason, end.log_length, end.kv_length) == ("prefilled", 40, 24)
    assert d.engine.stats().evictions == 0
    assert d.output[other] == alone(PROMPT, 4)
    after = d.run(1, [1], keep=40)
    assert (d.started[after].cached, d.started[after].lost) == (24, 0)
    assert d.output[after] == alone([*ahead, 1], 4)


def test_a_background_turn_that_finds_too_little_room_evicts_nobody():
    d = with_host()
    d.run(1, PROMPT)
    background = d.run(2, range(100, 140), max_tokens=0, background=True)
    assert (d.finished[background].reason, d.finished[background].kv_length) == ("prefilled", 0)
    assert d.engine.stats().evictions == 0


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
