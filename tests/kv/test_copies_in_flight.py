"""What may happen to a chain while its blocks are being copied between the tiers."""

import pytest
from kv_chains import demoted, hint, idle, in_host, kinds, more, on_device
from kv_device import tokens_of

from agentserve.kv.blocks import NoRoom


def restoring(d, count=10):
    """Return a chain whose loads for one more token are in flight, and its log."""
    chain, log = demoted(d, 0, count)
    assert d.admit(chain, more(log, 1)) == count
    assert kinds(flight.copy for flight in d.flights) == ["load"] * -(-count // 4)
    return chain, log


def everything_is_free(d) -> bool:
    """Whether no lock and no token of a tail is left, once whole blocks are not counted."""
    pools = (*d.kv.pools, *d.kv.host_pools)
    whole = all(pool.tokens == 4 * (pool.total - pool.free) for pool in pools)
    return whole and not any(pool.locked for pool in pools) and not d.kv.copies


# Loads


def test_a_restore_loads_in_token_order(device):
    d = device()
    chain, _ = restoring(d)
    targets = [holder.copies["device"] for holder in chain.groups[0].holders()]
    assert [flight.copy.target for flight in d.flights] == targets
    assert [flight.copy.tokens for flight in d.flights] == [4, 4, 2]
    assert chain.from_host == 10


@pytest.mark.parametrize("order", [(0, 0, 0), (2, 1, 0), (1, 0, 0)])
def test_a_restore_ends_with_its_last_load_whichever_that_is(device, order):
    d = device()
    chain, log = restoring(d)
    for number in order:
        assert chain.loading
        d.land(number)
    assert not chain.loading
    d.compute(chain, log)


def test_another_sequence_on_the_same_prefix_waits_for_the_same_loads(device):
    d = device()
    _, log = restoring(d)
    other = d.kv.open("a")
    assert d.admit(other, log[:8] + tokens_of([77])) == 8
    assert len(d.flights) == 3
    d.land(2)  # the first one's tail, which is none of the other's business
    assert other.loading
    d.land()
    assert other.loading
    d.land()
    assert not other.loading
    d.compute(other, log[:8] + tokens_of([77]))


def test_a_part_of_a_block_that_is_arriving_comes_from_its_host_copy(device):
    d = device()
    _, log = restoring(d)
    other = d.kv.open("a")
    assert d.admit(other, log[:8]) == 7  # all but the last token, in a block of its own
    assert [flight.copy.tokens for flight in d.flights] == [4, 4, 2, 3]
    d.land(0)
    assert other.loading
    d.land(2)
    assert not other.loading
    d.compute(other, log[:8])


def test_a_tail_that_is_arriving_and_has_no_other_copy_is_not_copied_from(device):
    d = device(late=True)
    chain, log = idle(d, 0, 10)
    fork = d.kv.fork(chain, 10)
    d.send()
    assert (fork.length, d.kv.fork(fork, 10).length) == (10, 8)
    d.land()
    assert d.kv.fork(fork, 10).length == 10
    d.turn(fork, more(log, 1))


def test_a_fork_of_a_chain_that_is_loading_waits_for_the_same_loads(device):
    d = device()
    chain, log = restoring(d)
    fork = d.kv.fork(chain, 10)
    cached = d.admit(fork, log[:10] + tokens_of([77]))
    assert cached >= 8
    assert fork.loading
    d.land_all(last_first=True)
    d.compute(fork, log[:10] + tokens_of([77]))
    d.compute(chain, log)


def test_a_turn_cancelled_while_its_loads_are_in_flight_is_resumed_on_them(device):
    d = device()
    chain, log = restoring(d)
    d.end(chain)
    d.kv.cut(chain, 6)
    d.kv.check()
    d.land()
    again = log[:6] + tokens_of([77, 78])
    assert d.admit(chain, again) in (4, 6)
    assert chain.loading
    d.land_all()
    d.compute(chain, again)
    assert chain.loaded <= 4


def test_a_chain_that_is_loading_is_no_victim(device):
    d = device(num_blocks=4)
    chain, log = restoring(d)
    d.end(chain)
    new, wanted = d.kv.open("a"), tokens_of(range(50, 66))
    assert isinstance(d.kv.acquire(new, wanted), NoRoom) or d.kv.reserve(new, 16) is not None
    assert len(d.flights) == 3
    d.kv.release(new)
    d.land_all()
    d.check_resident(chain, log)
    d.turn(new, wanted)
    d.turn(chain, log)


def test_closing_a_chain_that_is_loading_frees_all_of_it_when_the_loads_end(device):
    d = device()
    chain, _ = restoring(d)
    d.kv.close(chain)
    assert d.kv.pools[0].locked == 3
    d.land_all(last_first=True)
    assert everything_is_free(d)


# Saves


def test_the_host_copy_of_a_tail_goes_when_its_next_turn_comes(device):
    d = device()
    chain, log = idle(d, 0, 10, saved=True)
    d.admit(chain, more(log, 1))
    assert (in_host(chain), d.kv.host_pools[0].free) == (8, 30)
    d.compute(chain, log)
    d.settle()
    assert in_host(chain) == 11
    hint(d, chain, "host")
    d.settle()
    assert d.turn(chain, more(log, 1)) == 11


def test_a_stale_copy_of_a_tail_that_a_load_still_reads_is_not_taken_for_a_save(device):
    d = device(num_blocks=3)
    chain, log = demoted(d, 0, 1)
    fork = d.kv.fork(chain, 1)
    d.send()
    d.admit(chain, more(log, 1))
    d.land(1)  # the parent's; the fork's load still reads the host copy
    d.compute(chain, log)
    d.check_resident(chain, log)
    new, wanted = d.kv.open("a"), tokens_of(range(50, 58))
    d.turn(new, wanted)
    d.check_resident(chain, log)
    assert d.turn(chain, more(log, 1)) == 2
    d.turn(fork, tokens_of([0, 77]))


def test_a_turn_writes_its_tail_only_once_the_save_of_it_has_ended(device):
    d = device()
    chain, log = idle(d, 0, 10)
    d.step()
    assert d.admit(chain, more(log, 1)) == 10
    d.land()
    d.land()
    assert chain.loading
    d.land()
    assert not chain.loading
    assert in_host(chain) == 8
    d.compute(chain, log)
    d.settle()
    assert in_host(chain) == 11
    d.check_resident(chain, log)


def test_after_a_cancelled_turn_the_tail_is_written_once_its_old_save_has_ended_and_saved_anew(
    device,
):
    d = device()
    chain, log = idle(d, 0, 10)
    d.step()
    d.admit(chain, more(log[:], 1))
    d.end(chain)  # before a row could run
    d.step()
    d.admit(chain, more(log, 1))
    assert chain.loading
    d.end(chain)
    d.settle()
    assert in_host(chain) == 10
    d.turn(chain, log)


def test_a_turn_does_not_wait_for_saves_of_its_full_blocks(device):
    d = device()
    chain, log = idle(d, 0, 10)
    d.step()
    d.land(2)
    d.admit(chain, more(log, 1))
    assert not chain.loading
    d.compute(chain, log)
    d.land_all()
    d.check_resident(chain, log)


@pytest.mark.parametrize("keep", range(11))
def test_a_cut_while_saves_are_in_flight_keeps_what_is_before_it(device, keep):
    d = device()
    chain, log = idle(d, 0, 10)
    d.step()
    d.kv.cut(chain, keep)
    d.kv.check()
    new = log[:keep] + tokens_of([90, 91, 92])
    assert d.admit(chain, new) == keep
    d.land_all(last_first=True)
    d.compute(chain, new)
    d.settle()
    assert in_host(chain) == len(new)
    d.check_resident(chain, new)


@pytest.mark.parametrize("keep", range(11))
def test_a_fork_while_saves_are_in_flight_has_what_it_was_forked_from(device, keep):
    d = device()
    chain, log = idle(d, 0, 10)
    d.step()
    fork = d.kv.fork(chain, keep)
    d.kv.check()
    d.turn(fork, log[:keep] + tokens_of([90]))
    d.settle()
    assert in_host(chain) == 10
    assert in_host(fork) == keep + 1


@pytest.mark.parametrize("keep", range(11))
def test_a_fork_of_what_is_in_the_host_only_is_loaded_without_the_original(device, keep):
    d = device()
    chain, log = demoted(d, 0, 10)
    fork = d.kv.fork(chain, keep)
    new = log[:keep] + tokens_of([90])
    cached = d.turn(fork, new)
    assert keep - cached <= keep % 4
    assert d.turn(chain, more(log, 1)) == 10


def test_closing_a_chain_while_saves_are_in_flight_frees_all_of_it_when_they_end(device):
    d = device()
    chain, _ = idle(d, 0, 10)
    d.step()
    d.kv.close(chain)
    assert (d.kv.pools[0].locked, d.kv.host_pools[0].locked) == (3, 3)
    d.land_all(last_first=True)
    assert everything_is_free(d)


def test_a_block_whose_save_is_in_flight_does_not_count_as_saved(device):
    d = device(num_blocks=4)
    chain, log = idle(d, 0, 10)
    d.step()
    new, wanted = d.kv.open("a"), tokens_of(range(50, 62))
    assert isinstance(d.kv.acquire(new, wanted), NoRoom)
    d.land()
    d.land()
    assert d.kv.acquire(new, wanted) == 0  # two blocks are saved, but the tail hangs from them
    assert isinstance(d.kv.reserve(new, 12), NoRoom)
    assert on_device(chain) == 10
    d.land()
    assert d.kv.reserve(new, 12) is None
    assert in_host(chain) == 10
    d.check_resident(chain, log)


def test_a_failed_step_takes_none_of_its_blocks_to_the_host(device):
    d = device()
    chain, log = idle(d, 0, 8, saved=True)
    d.admit(chain, more(log, 8))
    d.write(chain, log, 12)
    d.write(chain, log, 16, garbage=True)
    d.kv.discard(chain)
    d.settle()
    assert in_host(chain) == 8
    assert d.turn(d.kv.open("a"), log) == 8


# Tickets


def test_tickets_that_are_unknown_early_or_told_twice_are_counted_and_ignored(device):
    d = device()
    idle(d, 0, 10)
    copies = d.kv.copies
    d.kv.residency.pump()
    copies.settle([1, 2, 3, 99])  # not sent yet, but for the last, which nobody has heard of
    assert (copies.stale, len(copies)) == (4, 3)
    ticket = d.send()[0].ticket
    d.land_all()
    copies.settle([ticket])
    assert (copies.stale, len(copies)) == (5, 0)


def test_a_ticket_that_does_not_come_back_is_asked_for_every_30_seconds(device):
    d = device()
    idle(d, 0, 8)
    d.now = 100.0
    first, second = (copy.ticket for copy in d.step())
    sent = d.now
    assert d.kv.copies.overdue(sent + 28.9) == []
    assert d.kv.copies.overdue(sent + 30.0) == [first, second]
    assert d.kv.copies.overdue(sent + 31.0) == []
    d.land()
    assert d.kv.copies.overdue(sent + 60.0) == [second]


def test_what_waits_to_be_sent_is_not_overdue(device):
    d = device()
    idle(d, 0, 8)
    d.kv.residency.pump()
    assert d.kv.copies.overdue(1e9) == []
