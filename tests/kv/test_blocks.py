import pytest

from agentserve.kv.blocks import BlockPool, InvariantError, LogicalBlock, NoRoom, Tail


def pool_of(total: int) -> BlockPool:
    return BlockPool("device", total, 4, lambda holder: None)


def block(parent: LogicalBlock | None = None) -> LogicalBlock:
    return LogicalBlock(parent, b"", "a", "m", b"")


def cached(pool: BlockPool, parent: LogicalBlock | None = None) -> LogicalBlock:
    holder = block(parent)
    pool.take(holder)
    pool.unlock_all([holder.copies[pool.tier]])
    return holder


def use(pool: BlockPool, holder) -> None:
    pool.lock_all([holder])
    pool.unlock_all([holder.copies[pool.tier]])


def test_free_cached_and_locked_slots_add_up_to_the_total():
    pool = pool_of(4)
    pool.take(block())
    cached(pool)
    assert (pool.free, pool.cached, pool.locked) == (2, 1, 1)
    pool.check()


def test_no_room_is_a_value_when_every_slot_is_locked():
    pool = pool_of(1)
    pool.take(block())
    assert isinstance(pool.take(block()), NoRoom)
    pool.check()


def test_the_least_recently_used_block_is_evicted_first():
    pool = pool_of(2)
    old, new = cached(pool), cached(pool)
    use(pool, old)
    pool.take(block())
    assert old.copies
    assert not new.copies
    assert pool.evictions == 1
    pool.check()


def test_a_block_with_a_resident_child_outlives_the_child():
    pool = pool_of(3)
    parent = cached(pool)
    child = cached(pool, parent)
    young = cached(pool)
    use(pool, child)
    use(pool, young)
    pool.take(block())
    assert parent.copies
    assert not child.copies
    assert young.copies
    pool.check()


def test_a_chain_is_evicted_from_its_leaf_to_its_root():
    pool = pool_of(4)
    chain = [cached(pool)]
    for _ in range(3):
        chain.append(cached(pool, chain[-1]))
    for gone in range(1, 5):
        pool.take(block())
        assert [bool(b.copies) for b in chain] == [True] * (4 - gone) + [False] * gone
        pool.check()


def test_a_locked_slot_that_nobody_wants_is_freed_at_its_last_unlock():
    pool = pool_of(1)
    tail = Tail(None, 2)
    slot = pool.take(tail)
    pool.fill(tail, 2)
    pool.lock(tail)
    pool.drop(tail)
    pool.unlock(slot)
    assert pool.free == 0
    pool.check()
    pool.unlock(slot)
    assert (pool.free, pool.tokens, tail.copies) == (1, 0, {})
    pool.check()


def test_each_holder_of_a_slot_has_its_own_generation():
    pool = pool_of(1)
    first = pool.take(block())
    generation = first.generation
    pool.unlock(first)
    second = pool.take(block())
    assert second is first
    assert second.generation == generation + 1


def test_unlocking_more_often_than_locking_is_a_bug_that_is_reported():
    pool = pool_of(1)
    slot = pool.take(block())
    pool.unlock(slot)
    with pytest.raises(InvariantError, match="INV-02"):
        pool.unlock(slot)


def test_the_eviction_queue_stays_as_small_as_the_pool():
    pool = pool_of(3)
    holders = [cached(pool) for _ in range(3)]
    for _ in range(100):
        for holder in holders:
            use(pool, holder)
    assert len(pool._queue) <= 3
    pool.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, slot: pool._free.append(slot.number), "INV-02"),
        (lambda pool, slot: setattr(slot, "locks", 3) or setattr(pool, "locked", 0), "INV-01"),
        (lambda pool, slot: setattr(slot, "dependents", 1), "INV-02"),
        (lambda pool, slot: setattr(slot, "holder", block()), "INV-02"),
        (lambda pool, slot: setattr(slot, "tokens", 5), "INV-03"),
        (lambda pool, slot: setattr(slot, "queued", False), "INV-06"),
        (lambda pool, slot: setattr(slot, "doomed", True), "INV-02"),
    ],
)
def test_check_names_the_invariant_that_is_broken(damage, message):
    pool = pool_of(2)
    holder = cached(pool)
    pool.check()
    damage(pool, holder.copies["device"])
    with pytest.raises(InvariantError, match=message):
        pool.check()
