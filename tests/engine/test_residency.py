"""KV that leaves the device between turns: what comes back is exact, and each turn is told."""

import random

import pytest
from engine_driver import Driver, alone
from two_tiers import PROMPT, offloaded, with_host

from agentserve.config import EngineSettings
from agentserve.engine.messages import Fork, Progress


def policy(name, **more):
    return EngineSettings(kv_policy=name, check_invariants=True, **more)


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
