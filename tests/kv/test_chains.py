import pytest
from kv_device import KvDevice, tokens_of

from agentserve.kv.blocks import InvariantError, NoRoom
from agentserve.kv.chains import KvCache, KvShape


def device(num_blocks=16, block_size=4, **options) -> KvDevice:
    return KvDevice(KvCache(KvShape("m", num_blocks, block_size), **options))


def test_the_next_turn_finds_all_kv_of_the_last_one():
    d = device()
    chain = d.kv.open("a")
    log = tokens_of(range(10))
    assert d.turn(chain, log) == 0
    log.extend([50, 51, 52])
    assert d.turn(chain, log) == 10


def test_an_idle_chain_locks_nothing():
    d = device()
    d.turn(d.kv.open("a"), tokens_of(range(10)))
    assert d.kv.pools[0].locked == 0
    assert d.kv.pools[0].cached == 3
    d.kv.check()


def test_another_sequence_hits_the_full_blocks_of_a_shared_prompt():
    d = device()
    d.turn(d.kv.open("a"), tokens_of(range(10)))
    assert d.turn(d.kv.open("a"), tokens_of([*range(10), 77])) == 8


def test_another_namespace_hits_nothing():
    d = device()
    d.turn(d.kv.open("a"), tokens_of(range(10)))
    assert d.turn(d.kv.open("b"), tokens_of(range(10))) == 0


def test_a_full_hit_computes_one_token_in_a_copy_of_the_last_block():
    d = device()
    first = d.kv.open("a")
    d.turn(first, tokens_of(range(8)))
    again = d.kv.open("a")
    assert d.turn(again, tokens_of(range(8))) == 7
    assert d.table(again)[0] == d.table(first)[0]
    assert d.table(again)[1] != d.table(first)[1]
    d.kv.check()


def test_without_room_for_the_copy_the_block_is_computed_again():
    d = device(num_blocks=2)
    d.turn(d.kv.open("a"), tokens_of(range(8)))
    assert d.turn(d.kv.open("a"), tokens_of(range(8))) == 4


@pytest.mark.parametrize("keep", range(11))
def test_a_cut_keeps_kv_up_to_the_cut_and_writes_into_no_shared_block(keep):
    d = device()
    chain, other = d.kv.open("a"), d.kv.open("a")
    old = tokens_of(range(10))
    d.turn(chain, old)
    d.kv.cut(chain, keep)
    new = old[:keep] + tokens_of([90, 91, 92])
    assert d.turn(chain, new) == keep
    assert d.turn(other, old) == 8
    d.kv.check()


def test_a_cut_and_the_same_tokens_again_use_the_old_block():
    d = device()
    chain = d.kv.open("a")
    log = tokens_of(range(10))
    d.turn(chain, log)
    d.kv.cut(chain, 5)
    assert d.turn(chain, log) == 8


@pytest.mark.parametrize("keep", range(11))
def test_a_fork_shares_full_blocks_and_copies_the_tail(keep):
    d = device()
    chain = d.kv.open("a")
    log = tokens_of(range(10))
    d.turn(chain, log)
    child = d.kv.fork(chain, keep)
    d.copy()
    assert d.turn(child, log[:keep] + tokens_of([70, 71])) == keep
    assert d.turn(chain, log + tokens_of([80])) == 10
    d.kv.check()


def test_a_fork_of_a_running_sequence_is_not_touched_by_what_follows():
    d = device()
    chain = d.kv.open("a")
    log = tokens_of(range(20))
    d.kv.acquire(chain, log)
    d.write(chain, log, 10)
    child = d.kv.fork(chain, 10)
    d.write(chain, log, 20)
    d.kv.release(chain)
    assert d.turn(child, log[:10] + tokens_of([99])) == 10
    d.kv.check()


def test_a_fork_without_room_for_the_tail_keeps_the_full_blocks():
    d = device(num_blocks=3)
    chain = d.kv.open("a")
    log = tokens_of(range(10))
    d.kv.acquire(chain, log)
    d.write(chain, log, 10)
    child = d.kv.fork(chain, 10)
    assert child.length == 8
    d.kv.check()


def test_a_source_closed_before_its_copy_runs_is_freed_after_it():
    d = device()
    chain = d.kv.open("a")
    log = tokens_of(range(6))
    d.turn(chain, log)
    child = d.kv.fork(chain, 6)
    d.kv.close(chain)
    d.kv.check()
    assert d.turn(child, log + tokens_of([9])) == 6
    d.kv.check()


def test_two_equal_blocks_at_once_leave_one_entry_and_join_at_the_next_turn():
    d = device()
    one, two = d.kv.open("a"), d.kv.open("a")
    log = tokens_of(range(12))
    d.kv.acquire(one, log)
    d.kv.acquire(two, log)
    for length in (4, 8, 12):
        assert d.write(one, log, length)
        assert d.write(two, log, length)
        d.kv.check()
    assert set(d.table(one)).isdisjoint(d.table(two))
    d.kv.release(one)
    d.kv.release(two)
    longer = log + tokens_of([5])
    assert d.turn(one, longer) == 12
    assert d.turn(two, longer) == 12
    assert d.table(one)[:3] == d.table(two)[:3]
    d.kv.check()


def test_what_follows_a_twin_is_found_by_others():
    d = device()
    one, two = d.kv.open("a"), d.kv.open("a")
    short, long = tokens_of(range(5)), tokens_of(range(13))
    d.kv.acquire(one, short)
    d.kv.acquire(two, long)
    d.write(one, short, 5)
    d.write(two, long, 13)
    d.kv.release(one)
    d.kv.release(two)
    assert d.turn(d.kv.open("a"), tokens_of([*range(13), 1])) == 12
    d.kv.check()


def test_evicted_blocks_are_computed_again():
    d = device(num_blocks=4)
    chain = d.kv.open("a")
    log = tokens_of(range(10))
    d.turn(chain, log)
    d.turn(d.kv.open("a"), tokens_of(range(100, 108)))
    cached = d.turn(chain, log)
    assert cached < 9
    assert cached % 4 == 0
    d.kv.check()


def test_no_room_changes_nothing():
    d = device(num_blocks=4)
    busy = d.kv.open("a")
    log = tokens_of(range(8))
    d.kv.acquire(busy, log)
    assert d.write(busy, log, 8)
    waiting = d.kv.open("a")
    assert isinstance(d.kv.acquire(waiting, tokens_of(range(50, 60))), NoRoom)
    assert isinstance(d.kv.acquire(waiting, tokens_of(range(50, 58)), headroom=1), NoRoom)
    assert not waiting.active
    assert d.kv.pools[0].locked == 2
    d.kv.check()


def test_what_a_failed_step_wrote_is_never_found():
    d = device()
    chain = d.kv.open("a")
    log = tokens_of(range(12))
    d.turn(chain, log[:4])
    d.kv.acquire(chain, log)
    d.write(chain, log, 8)
    d.write(chain, log, 12, garbage=True)
    d.kv.discard(chain)
    d.kv.check()
    assert d.kv.pools[0].locked == 0
    assert d.turn(chain, log) <= 4
    assert d.turn(d.kv.open("a"), log + tokens_of([1])) == 12


def test_a_finished_copy_that_nobody_knows_is_counted():
    d = device()
    d.kv.copies.settle([12345])
    assert d.kv.copies.stale == 1
    d.kv.check()


def test_a_truncated_digest_gives_fewer_hits_and_no_wrong_ones():
    d = device(num_blocks=64, digest=lambda data: bytes([sum(data) % 4]))
    logs = [tokens_of([i, i + 1, i * 7 % 5, 3] * 3 + [i]) for i in range(12)]
    chains = [d.kv.open("a") for _ in logs]
    for _ in range(2):
        for chain, log in zip(chains, logs, strict=True):
            log.append(1)
            d.turn(chain, log)
            d.kv.check()


def test_two_groups_hold_the_same_length():
    kv = KvCache(KvShape("m", 8, 4, groups=2))
    chain = kv.open("a")
    log = tokens_of(range(10))
    assert kv.acquire(chain, log) == 0
    assert kv.reserve(chain, 10) is None
    assert [len(blocks) for blocks in kv.announce(chain)] == [3, 3]
    kv.commit(chain, log, 10)
    kv.check()
    kv.release(chain)
    assert kv.acquire(chain, log) == 9
    assert kv.announce(chain) != [[], []]
    assert kv.announce(chain) == [[], []]
    kv.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, c: d.kv.pools[0].lock(c.groups[0].blocks[0]), "INV-02"),
        (lambda d, c: setattr(c, "length", 99), "INV-03"),
        (lambda d, c: d.kv.open("a").groups[0].tails.append(c.groups[0].tails[0]), "INV-04"),
        (lambda d, c: setattr(c.groups[0].tails[0], "valid_tokens", 4), "INV-04"),
    ],
)
def test_check_names_the_invariant_that_a_chain_breaks(damage, message):
    d = device()
    chain = d.kv.open("a")
    log = tokens_of(range(10))
    d.kv.acquire(chain, log)
    d.write(chain, log, 10)
    d.kv.check()
    damage(d, chain)
    with pytest.raises(InvariantError, match=message):
        d.kv.check()


def test_check_tokens_sees_a_block_of_another_sequence():
    d = device()
    chain = d.kv.open("a")
    d.turn(chain, tokens_of(range(10)))
    with pytest.raises(InvariantError, match="INV-04"):
        d.kv.check_tokens(chain, tokens_of(range(1, 11)))


def test_a_running_chain_is_neither_cut_nor_acquired():
    d = device()
    chain = d.kv.open("a")
    d.kv.acquire(chain, tokens_of(range(4)))
    with pytest.raises(InvariantError, match="INV-10"):
        d.kv.cut(chain, 0)
    with pytest.raises(InvariantError, match="INV-10"):
        d.kv.acquire(chain, tokens_of(range(4)))
