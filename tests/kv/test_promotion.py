"""Hints, announced turns, and who may be admitted at whose cost."""

import pytest
from kv_chains import demoted, hint, idle, in_host, kinds, more, on_device
from kv_device import tokens_of

from agentserve.kv.blocks import NoRoom
from agentserve.kv.residency import LOADS_AHEAD

BLOCK = 4


# Hints


def test_a_hint_that_it_may_go_to_the_host_makes_room_once_all_is_saved(device):
    d = device()
    chain, log = idle(d, 0, 10)
    hint(d, chain, "host")
    assert kinds(d.step()) == ["save"] * 3
    d.land()
    d.land()
    d.step()
    assert on_device(chain) == 10
    d.land()
    assert not d.step()
    assert (on_device(chain), in_host(chain)) == (0, 10)
    assert d.turn(chain, more(log, 1)) == 10


def test_a_chain_that_is_saved_already_leaves_at_once_and_without_a_copy(device):
    d = device()
    chain, _ = idle(d, 0, 10, saved=True)
    hint(d, chain, "host")
    assert not d.step()
    assert (on_device(chain), in_host(chain)) == (0, 10)


def test_a_turn_that_comes_before_its_chain_has_left_keeps_it(device):
    d = device()
    chain, log = idle(d, 0, 10)
    hint(d, chain, "host")
    d.step()
    d.turn(chain, more(log, 1))
    d.settle()
    assert (on_device(chain), chain.loaded) == (11, 0)


def test_a_hint_that_a_chain_may_be_dropped_forgets_it_in_both_tiers(device):
    d = device()
    chain, log = idle(d, 0, 10, saved=True)
    hint(d, chain, "drop")
    d.settle()
    assert (d.kv.pools[0].free, d.kv.host_pools[0].free) == (16, 32)
    assert d.turn(chain, more(log, 1)) == 0


@pytest.mark.parametrize("kv", ["drop", "host"])
def test_a_fork_at_a_block_keeps_its_blocks_when_the_first_chain_is_sent_away(device, kv):
    d = device()
    chain, _ = idle(d, 0, 12, saved=True)
    fork = d.kv.fork(chain, 8)
    d.settle()
    hint(d, chain, kv)
    d.settle()
    assert (on_device(fork), in_host(fork)) == (8, 8)
    assert on_device(chain) == 8


def test_an_announced_turn_that_does_not_come_protects_its_chain_for_30_seconds(device):
    d = device()
    chain, _ = idle(d, 0, 8, saved=True)
    d.kv.residency.promote(chain, begin=True)
    d.now += 20.0
    d.settle()
    assert chain.idle.promoted
    d.now += 20.0
    d.settle()
    assert not chain.idle.promoted


def test_a_dropped_chain_takes_nothing_from_its_fork(device):
    d = device()
    chain, log = idle(d, 0, 10)
    fork = d.kv.fork(chain, 10)
    d.settle()
    hint(d, chain, "drop")
    assert d.turn(fork, more(log, 1)) == 10


# Promotion


def test_an_announced_turn_finds_its_kv_on_the_device(device):
    d = device()
    chain, log = demoted(d, 0, 10)
    d.kv.residency.promote(chain, begin=True)
    assert kinds(d.step()) == ["load"] * 3
    d.land_all()
    d.check_resident(chain, log)
    assert d.kv.pools[0].locked == 0
    assert d.kv.acquire(chain, more(log, 1)) == 10
    assert not chain.loading
    assert chain.from_host == 0


def test_a_turn_that_comes_while_it_is_promoted_waits_for_the_same_loads(device):
    d = device()
    chain, log = demoted(d, 0, 10)
    d.kv.residency.promote(chain, begin=True)
    d.step()
    assert d.admit(chain, more(log, 1)) == 10
    assert len(d.flights) == 3
    assert chain.loading
    d.land_all()
    d.compute(chain, log)
    assert chain.loaded == 3


def test_promotion_takes_room_from_colder_chains(device):
    d = device(num_blocks=4)
    chain, _ = demoted(d, 0, 8)
    cold, _ = idle(d, 50, 8, saved=True)
    warm, _ = idle(d, 100, 8, saved=True)
    d.kv.residency.promote(chain, begin=True)
    d.settle()
    assert [on_device(c) for c in (chain, cold, warm)] == [8, 0, 8]


@pytest.mark.parametrize("state", ["queued", "promoted"])
def test_promotion_takes_no_room_from_turns_that_are_queued_or_announced(device, state):
    d = device(num_blocks=4)
    chain, log = demoted(d, 0, 8)
    other, _ = idle(d, 50, 16, saved=True)
    setattr(other.idle, state, True)
    chain.idle.since = d.now + 1.0  # by use alone the other is colder
    d.kv.residency.promote(chain, begin=True)
    assert not d.step()
    assert (on_device(chain), on_device(other)) == (0, 16)
    assert d.turn(chain, more(log, 1)) == 8  # a turn that is there may


def test_promotion_takes_no_room_from_what_is_not_saved(device):
    d = device(num_blocks=4, host=2)
    chain, _ = demoted(d, 0, 8)
    other, _ = idle(d, 50, 16)
    d.kv.residency.promote(chain, begin=True)
    assert not d.step()
    assert on_device(other) == 16


def test_promotion_that_is_called_off_stops(device):
    d = device(num_blocks=80, host=80)
    blocks = LOADS_AHEAD + 6
    chain, log = demoted(d, 0, blocks * BLOCK)
    d.kv.residency.promote(chain, begin=True)
    assert len(d.step()) == LOADS_AHEAD
    d.kv.residency.promote(chain, begin=False)
    d.land_all()
    assert not d.step()
    assert on_device(chain) == LOADS_AHEAD * BLOCK
    assert not chain.idle.promoted
    d.turn(chain, more(log, 1))
    assert chain.loaded == blocks


# Admission


def test_a_shared_prefix_counts_once_however_many_run_on_it(device):
    d = device(num_blocks=12)
    root, log = idle(d, 0, 16)
    forks = [d.kv.fork(root, 16) for _ in range(9)]
    for number, fork in enumerate(forks[:8]):
        assert d.admit(fork, log + tokens_of([100 + number])) == 16
        assert d.write(fork, log + tokens_of([100 + number]), 17)
    assert d.kv.pools[0].locked == 12
    assert d.kv.acquire(forks[8], log + tokens_of([99])) == NoRoom(5, 4)
    for number, fork in enumerate(forks[:8]):
        assert d.read(fork) == [*range(16), 100 + number]


def test_a_shared_prefix_in_the_host_is_loaded_once_for_all(device):
    d = device(num_blocks=12)
    root, log = demoted(d, 0, 16)
    forks = [d.kv.fork(root, 16) for _ in range(8)]
    for number, fork in enumerate(forks):
        assert d.admit(fork, log + tokens_of([100 + number])) == 16
    assert len(d.flights) == 4
    assert all(fork.loading for fork in forks)
    d.land_all()
    assert not any(fork.loading for fork in forks)


def test_an_admission_that_may_not_evict_takes_nothing_from_an_open_sequence(device):
    d = device(num_blocks=4)
    kept, _ = idle(d, 0, 8, saved=True)
    gone, _ = idle(d, 100, 4, saved=True)
    d.kv.close(gone)  # its block is cached still, and nobody's
    new = d.kv.open("a")
    assert d.kv.acquire(new, tokens_of(range(50, 62)), evict=False) == 0
    assert d.kv.has_free(new, 8)
    assert not d.kv.has_free(new, 9)
    assert d.kv.reserve(new, 8) is None
    assert on_device(kept) == 8
    assert isinstance(d.kv.acquire(d.kv.open("a"), tokens_of(range(3)), evict=False), NoRoom)
