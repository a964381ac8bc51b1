"""The invariants of chains, verified after every step in tests.

1. Locks are exactly those of active chains and of copies in flight (INV-02, INV-07).
2. What a locked holder hangs from is locked, copies apart: so what is not locked can be evicted.
3. Committed tokens fit the blocks that the chain has (INV-03); a tail belongs to one chain and is
   never a full block (INV-04).
4. A block's owners are the open chains that name it (INV-02).
5. The full blocks of a chain hold the first tokens of its sequence (INV-04, `check_tokens`).
"""

from collections import Counter
from collections.abc import Iterable

from agentserve.kv.blocks import LogicalBlock, Tail, require
from agentserve.kv.copies import DEVICE, TIERS, CopyQueue
from agentserve.kv.lookup import Chain, GroupChain
from agentserve.kv.tiers import Group


def check_locks(number: int, group: Group, chains: Iterable[Chain], copies: CopyQueue) -> None:
    """Verify that turns and copies in flight lock what they name, and nothing else does."""
    expected = {tier: Counter(copies.locked(tier, number)) for tier in TIERS}
    for chain in chains:
        if chain.active:
            part = chain.groups[number]
            named = [h.copies[DEVICE] for h in (*part.blocks, *part.aside, *part.tails)]
            expected[DEVICE].update(named)
            _check_active(part, group.device.block_size)
    for pool in group.pools:
        locks = expected[pool.tier]
        require(
            pool.locked == len(locks) and all(slot.locks == count for slot, count in locks.items()),
            "INV-02: locks differ from the turns and copies in flight",
        )


def check_owners(number: int, chains: Iterable[Chain]) -> None:
    """Verify who names each block, and that a tail has one owner."""
    owners: Counter[LogicalBlock] = Counter()
    tails: set[Tail] = set()
    for chain in chains:
        part = chain.groups[number]
        owners.update(part.blocks)
        require(tails.isdisjoint(part.tails), "INV-04: a tail belongs to two chains")
        tails.update(part.tails)
    require(
        all(block.owners == count for block, count in owners.items()),
        "INV-02: owners differ from the sequences that name a block",
    )


def _check_active(part: GroupChain, block_size: int) -> None:
    named = {h.copies[DEVICE] for h in (*part.blocks, *part.aside, *part.tails)}
    for slot in named:
        require(
            slot.parent is None or slot.parent.copies[DEVICE] in named,
            "INV-06: a locked block hangs from one that is not",
        )
    require(
        all(tail.valid_tokens < block_size for tail in part.tails),
        "INV-04: a full tail is not sealed",
    )
