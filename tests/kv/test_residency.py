"""What is written back, given up, loaded and promoted, seen from outside."""

import pytest
from kv_chains import demoted, hint, idle, in_host, kinds, more, on_device
from kv_device import tokens_of

from agentserve.kv.blocks import NoRoom
from agentserve.kv.residency import SAVES_IN_FLIGHT

BLOCK = 4


# Write-back


def test_a_turn_is_saved_in_token_order_with_its_tail(device):
    d = device()
    chain, log = idle(d, 0, 10)
    copies = d.step()
    assert kinds(copies) == ["save"] * 3
    slots = [holder.copies["device"] for holder in chain.groups[0].holders()]
    assert [copy.source for copy in copies] == slots
    assert [copy.tokens for copy in copies] == [4, 4, 2]
    assert in_host(chain) == 0
    d.land_all()
    assert in_host(chain) == 10
    d.check_resident(chain, log)
    assert not d.step()


def test_the_next_turn_saves_only_new_blocks_and_its_tail(device):
    d = device()
    chain, log = idle(d, 0, 10, saved=True)
    d.turn(chain, more(log, 5))
    assert [copy.tokens for copy in d.step()] == [4, 3]
    d.land_all()
    assert chain.saved == 5
    assert d.kv.host_pools[0].cached == 4
    d.check_resident(chain, log)


def test_a_turn_without_a_new_token_in_full_blocks_saves_its_tail_alone(device):
    d = device()
    chain, log = idle(d, 0, 9, saved=True)
    d.turn(chain, more(log, 1))
    assert [copy.tokens for copy in d.step()] == [2]


def test_a_shared_block_is_saved_once(device):
    d = device()
    one, log = idle(d, 0, 8)
    two = d.kv.open("a")
    d.turn(two, more(log[:], 1))
    d.settle()
    assert (one.saved, two.saved) == (2, 1)
    assert d.kv.host_pools[0].cached == 3


def test_a_shared_block_whose_save_is_in_flight_is_not_saved_again(device):
    d = device()
    _, log = idle(d, 0, 8)
    assert kinds(d.step()) == ["save"] * 2
    d.turn(d.kv.open("a"), more(log, 1))
    d.settle()
    assert d.kv.host_pools[0].cached == 3


def test_twins_are_saved_once(device):
    d = device()
    one, two, log = d.kv.open("a"), d.kv.open("a"), tokens_of(range(8))
    for chain in (one, two):
        d.admit(chain, log)
    for length in (4, 8):
        d.write(one, log, length)
        d.write(two, log, length)
    d.end(one)
    d.end(two)
    d.settle()
    assert one.saved + two.saved == 2


def test_few_saves_are_in_flight_at_once(device):
    d = device(num_blocks=64, host=64)
    idle(d, 0, 4 * (SAVES_IN_FLIGHT + 5))
    assert len(d.step()) == SAVES_IN_FLIGHT
    assert not d.step()
    d.land_all()
    assert len(d.step()) == 5


def test_nothing_is_saved_while_loads_are_in_flight(device):
    d = device()
    cold, log = demoted(d, 0, 8)
    idle(d, 100, 8)
    d.admit(cold, more(log, 1))
    assert not d.step()
    d.land_all()
    assert kinds(d.step()) == ["save", "save"]


# Giving up device slots


def test_what_is_saved_leaves_the_device_without_a_copy(device):
    d = device(num_blocks=4)
    first, log = idle(d, 0, 10, saved=True)
    other = d.kv.open("a")
    assert d.kv.acquire(other, tokens_of(range(50, 66))) == 0
    assert d.kv.reserve(other, 16) is None
    assert not d.kv.copies
    assert (on_device(first), in_host(first)) == (0, 10)
    d.kv.release(other)
    assert d.turn(first, more(log, 1)) == 10


def test_what_is_not_saved_is_saved_before_it_leaves_the_device(device):
    d = device(num_blocks=4)
    first, log = idle(d, 0, 10)
    other, wanted = d.kv.open("a"), tokens_of(range(50, 66))
    assert d.kv.acquire(other, wanted) == 0
    assert isinstance(d.kv.reserve(other, 16), NoRoom)
    assert kinds(d.send()) == ["save"] * 3
    d.land_all()
    assert d.kv.reserve(other, 16) is None
    d.kv.release(other)
    assert d.turn(first, more(log, 1)) == 10


def test_blocks_leave_last_first_and_only_as_many_as_are_needed(device):
    d = device(num_blocks=4)
    first, log = idle(d, 0, 10, saved=True)
    idle(d, 50, 8)
    assert (on_device(first), in_host(first)) == (8, 10)
    d.settle()
    d.admit(first, more(log, 1))
    assert [flight.copy.tokens for flight in d.flights] == [2]
    assert first.from_host == 2
    d.land_all()
    d.compute(first, log)


def test_blocks_that_nobody_names_leave_before_those_of_idle_chains(device):
    d = device(num_blocks=4)
    first, _ = idle(d, 0, 8, saved=True)
    closed, _ = idle(d, 50, 8, saved=True)
    d.kv.close(closed)
    idle(d, 100, 8)
    assert on_device(first) == 8


def test_a_turn_that_was_interrupted_locks_nothing_and_its_kv_is_kept_in_the_host(device):
    d = device(num_blocks=4)
    chain, log = d.kv.open("a"), tokens_of(range(14))
    d.admit(chain, log)
    d.write(chain, log, 10)
    d.end(chain)
    assert d.kv.pools[0].locked == 0
    idle(d, 50, 14)
    assert d.turn(chain, log) == 10


def test_without_a_host_tier_what_has_to_go_is_lost(device):
    d = device(num_blocks=4, host=0)
    chain, log = idle(d, 0, 10)
    hint(d, chain, "host")
    d.kv.residency.promote(chain, begin=True)
    assert not d.kv.residency.pending
    idle(d, 50, 8)
    assert d.turn(chain, more(log, 1)) == 8
    assert chain.lost == 2


def test_a_policy_without_host_leaves_the_host_alone(device):
    d = device(num_blocks=4, policy="device-lru")
    chain, _ = idle(d, 0, 10)
    assert not d.kv.residency.pending
    assert d.kv.host_pools[0].total == 0
    assert on_device(chain) == 10


def test_the_policy_that_keeps_nothing_leaves_both_tiers_empty_after_a_turn(device):
    d = device(policy="none")
    chain, log = idle(d, 0, 10)
    d.settle()
    assert (d.kv.pools[0].free, d.kv.host_pools[0].total) == (16, 0)
    assert d.turn(chain, more(log, 1)) == 0
    assert chain.lost == 10


# A host that is too small


def test_in_a_small_host_the_first_blocks_of_a_chain_are_saved(device):
    d = device(num_blocks=4, host=2)
    chain, log = idle(d, 0, 14, saved=True)
    assert in_host(chain) == 8
    idle(d, 50, 16)
    assert d.turn(chain, log) == 8


@pytest.mark.parametrize(("field", "value"), [("queued", 1), ("promoted", True), ("kv", "device")])
def test_in_a_full_host_what_is_not_saved_is_lost_and_hotter_chains_keep_their_copies(
    device, field, value
):
    d = device(num_blocks=4, host=2)
    hot, _ = demoted(d, 0, 8)
    cold, log = idle(d, 50, 16)
    setattr(hot.idle, field, value)
    idle(d, 100, 16)
    assert (on_device(cold), in_host(cold)) == (0, 0)
    assert in_host(hot) == 8
    assert d.turn(cold, log) == 0


def test_in_a_full_host_colder_chains_lose_their_copies_to_hotter_ones(device):
    d = device(num_blocks=4, host=2)
    cold, _ = demoted(d, 0, 8)
    hot, log = idle(d, 50, 8)
    idle(d, 100, 16)
    assert (in_host(cold), in_host(hot)) == (0, 8)
    assert d.turn(hot, more(log, 1)) == 8


def test_in_a_full_host_saves_ahead_of_need_cost_idle_chains_nothing(device):
    d = device(host=2)
    first, _ = idle(d, 0, 8, saved=True)
    second, _ = idle(d, 50, 8, saved=True)
    assert (in_host(first), in_host(second)) == (8, 0)


def test_in_a_full_host_doubles_of_running_chains_go_first(device):
    d = device(host=4)
    kept, _ = idle(d, 0, 8, saved=True)
    running, log = idle(d, 50, 8, saved=True)
    d.admit(running, more(log, 1))
    ended, _ = idle(d, 100, 8, saved=True)
    assert (in_host(kept), in_host(running), in_host(ended)) == (8, 0, 8)
    d.compute(running, log)


def test_in_a_full_host_what_a_save_hangs_from_is_not_given_up_for_it(device):
    d = device(host=2)
    chain, log = idle(d, 0, 8, saved=True)
    running = d.kv.fork(chain, 8)
    d.admit(running, log + tokens_of([77]))
    d.turn(chain, more(log, 4))
    d.settle()
    assert in_host(chain) == 8
    d.compute(running, log[:8] + tokens_of([77]))


def test_two_chains_that_do_not_fit_both_tiers_take_turns_for_ever(device):
    d = device(num_blocks=4, host=1)
    logs = {d.kv.open("a"): tokens_of(range(n, n + 12)) for n in (0, 50)}
    for _ in range(6):
        for chain, log in logs.items():
            d.turn(chain, log)
            d.check_resident(chain, log)
            d.step()


def test_a_host_copy_that_is_lost_is_computed_again_and_nothing_else(device):
    d = device()
    chain, log = demoted(d, 0, 14)
    assert d.kv.residency.drop_host(lambda chains: chains[0])
    assert in_host(chain) == 12
    assert not chain.idle.clean
    assert d.turn(chain, log) == 12
    assert chain.lost == 1  # the last token is computed in any case
