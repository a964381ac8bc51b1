"""Chains: which blocks hold the KV of each sequence, in every KV group.

A chain is the list of a sequence's full blocks, then tails: the first partly filled, the others
reserved for the rows of the next step. A chain is *active* while its turn runs; then, and only
then, it locks what it names. An idle chain locks nothing: what it names may be evicted, and is
looked up again, through the prefix index, when the next turn is admitted.

Two chains can compute equal blocks at once. The later copy stays unindexed, its *twin* is the
entry; children of either hang from the entry, so that others find them. The chain keeps the entry
locked (`aside`) and goes over to it at its next `acquire`.

Invariants, verified by `KvCache.check`:
 1. Locks are exactly those of active chains and of copies in flight (INV-02, INV-07).
 2. What a locked holder hangs from is locked, copies apart: so what is not locked can be evicted.
 3. Committed tokens fit the blocks that the chain has (INV-03); a tail belongs to one chain and is
    never a full block (INV-04).
 4. The full blocks of a chain hold the first tokens of its sequence (INV-04, `check_tokens`).
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from agentserve.kv.blocks import Block, BlockPool, LogicalBlock, NoRoom, Tail, require
from agentserve.kv.copies import CopyQueue
from agentserve.kv.lookup import TIER, Found, GroupChain, find
from agentserve.kv.prefix import PrefixIndex, sha256


@dataclass(slots=True, eq=False)
class Chain:
    """The KV of one sequence. `length` tokens of it were computed and may still be resident."""

    namespace: str
    groups: list[GroupChain]
    length: int = 0
    active: bool = False
    acquired: int = 0  # length when it became active: what this turn did not compute
    capacity: int = 0  # tokens that fit the blocks it has


class _Group:
    """Pool and index of one KV group."""

    def __init__(
        self, identity: str, num_blocks: int, block_size: int, digest: Callable[[bytes], bytes]
    ) -> None:
        self.index = PrefixIndex(identity, digest)
        self.pool = BlockPool(TIER, num_blocks, block_size, self.index.cleared)


class KvCache:
    """Chains, pools and indexes of all KV groups, and the copies that wait or are in flight."""

    def __init__(
        self,
        identity: str,
        num_blocks: int,
        block_size: int,
        groups: int = 1,
        digest: Callable[[bytes], bytes] = sha256,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._groups = [_Group(identity, num_blocks, block_size, digest) for _ in range(groups)]
        self._chains: set[Chain] = set()
        self.copies = CopyQueue(self.pools)

    @property
    def pools(self) -> list[BlockPool]:
        """One pool per KV group."""
        return [group.pool for group in self._groups]

    @property
    def releases(self) -> int:
        """A number that changes whenever room may have grown."""
        return sum(group.pool.releases for group in self._groups)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def open(self, namespace: str) -> Chain:
        """Return an empty chain."""
        chain = Chain(namespace, [GroupChain() for _ in self._groups])
        self._chains.add(chain)
        return chain

    def close(self, chain: Chain) -> None:
        """Forget the chain; its tail is freed, its full blocks stay for others to find."""
        self.release(chain)
        for part, group in zip(chain.groups, self._groups, strict=True):
            _drop_tails(part, group.pool)
        self._chains.discard(chain)

    def cut(self, chain: Chain, keep: int) -> None:
        """Shorten an idle chain to at most `keep` tokens. Copies nothing yet."""
        require(not chain.active, "INV-10: a running chain is cut")
        if keep >= chain.length:
            return
        chain.length = keep
        full, rest = divmod(keep, self.block_size)
        for part, group in zip(chain.groups, self._groups, strict=True):
            if full < len(part.blocks):
                _drop_tails(part, group.pool)
                part.branch = part.blocks[full] if rest else None
                del part.blocks[full:]
            elif not rest:
                _drop_tails(part, group.pool)
                part.branch = None
            elif part.tail is not None:
                part.tails[0].valid_tokens = rest
                group.pool.fill(part.tails[0], rest)

    def fork(self, chain: Chain, keep: int) -> Chain:
        """Return an idle chain with the first `keep` tokens; full blocks are shared, a tail copied.

        Without room for the tail's copy the fork is shorter, down to its last full block.
        """
        child = self.open(chain.namespace)
        child.length = min(keep, chain.length)
        full, rest = divmod(child.length, self.block_size)
        for part, twig in zip(chain.groups, child.groups, strict=True):
            twig.blocks = part.blocks[:full]
            twig.straight = part.straight
            if rest:
                twig.branch = part.blocks[full] if full < len(part.blocks) else part.branch
        if rest and child.groups[0].branch is None and not self._copy_tails(chain, child, rest):
            self.cut(child, full * self.block_size)
        return child

    def acquire(self, chain: Chain, tokens: "array[int]", headroom: int = 0) -> int | NoRoom:
        """Make `chain` active for a turn over `tokens` and return how many of them have KV.

        At most len(tokens) - 1, so that there is a row to sample from. Locks the resident prefix,
        goes on by prefix hits, and copies what it needs of a block that it shares. NoRoom, and
        nothing changed, unless there is room for all of `tokens` with `headroom` blocks left over.
        """
        require(not chain.active, "INV-10: a running chain is acquired")
        self.cut(chain, len(tokens) - 1)
        found = [
            find(part, group.index, chain.namespace, tokens, self.block_size)
            for part, group in zip(chain.groups, self._groups, strict=True)
        ]
        length = min(len(f.blocks) * self.block_size + f.count for f in found)
        wanted = self.blocks_for(len(tokens)) + headroom
        found, short = self._shorten(found, length, wanted)
        if short > 0 and any(f.is_copy for f in found):
            length -= length % self.block_size  # the copy's source may be one slot too many
            found, short = self._shorten(found, length, wanted)
        if short > 0:
            return NoRoom(wanted, wanted - short)
        chain.active = True
        for number in range(len(self._groups)):
            length = min(length, self._adopt(number, chain.groups[number], found[number]))
        chain.length = chain.acquired = length
        self._measure(chain)
        return length

    def reserve(self, chain: Chain, length: int) -> NoRoom | None:
        """Give an active chain blocks for its first `length` tokens; None when it has them.

        On NoRoom it keeps what it got.
        """
        if length <= chain.capacity:
            return None
        missing: NoRoom | None = None
        for part, group in zip(chain.groups, self._groups, strict=True):
            while missing is None and self._capacity(part) < length:
                first = part.blocks[-1] if part.blocks and not part.tails else None
                tail = Tail(first)
                slot = group.pool.take(tail)
                if isinstance(slot, NoRoom):
                    missing = slot
                else:
                    part.tails.append(tail)
        self._measure(chain)
        return missing

    def commit(self, chain: Chain, tokens: "array[int]", length: int) -> None:
        """Note that the first `length` of `tokens` have KV; tails that became full are indexed."""
        require(length <= chain.capacity, "INV-03: more tokens committed than reserved")
        for part, group in zip(chain.groups, self._groups, strict=True):
            rest = length - len(part.blocks) * self.block_size
            while rest >= self.block_size:
                self._seal(chain, part, group, tokens)
                rest -= self.block_size
            if rest:
                part.tails[0].valid_tokens = rest
                group.pool.fill(part.tails[0], rest)
        chain.length = length

    def announce(self, chain: Chain) -> list[list[int]]:
        """Return per group the slot numbers that joined the block table since the last call."""
        news: list[list[int]] = []
        for part in chain.groups:
            known = part.announced
            part.announced = len(part.blocks) + len(part.tails)
            if known == part.announced:
                news.append([])
                continue
            holders: list[Block] = [*part.blocks[known:]]
            holders += part.tails[max(0, known - len(part.blocks)) :]
            news.append([holder.copies[TIER].number for holder in holders])
        return news

    def release(self, chain: Chain) -> None:
        """End the turn: unlock everything, give back reserved blocks. Does nothing when idle."""
        if not chain.active:
            return
        chain.active = False
        chain.capacity = 0
        for part, group in zip(chain.groups, self._groups, strict=True):
            pool = group.pool
            pool.unlock_all((*part.blocks, *part.aside, *part.tails))
            part.aside.clear()
            part.announced = 0
            for tail in part.tails:
                if not tail.valid_tokens:
                    pool.drop(tail)
            part.tails = [tail for tail in part.tails if tail.valid_tokens]

    def discard(self, chain: Chain) -> None:
        """End a turn whose step failed: what it wrote is never used again."""
        if not chain.active:
            return
        kept = chain.acquired // self.block_size
        written = [part.blocks[kept:] for part in chain.groups]
        for blocks, group in zip(written, self._groups, strict=True):
            for block in blocks:
                group.index.condemn(block)
        self.release(chain)
        self.cut(chain, kept * self.block_size)
        for blocks, group in zip(written, self._groups, strict=True):
            for block in reversed(blocks):
                if block.copies[TIER].evictable:
                    group.pool.drop(block)

    def check(self) -> None:
        """Verify the invariants of kv; cost grows with pools and chains. Raises InvariantError."""
        for number, group in enumerate(self._groups):
            group.pool.check()
            group.index.check()
            expected = Counter(self.copies.locked(number))
            tails: set[Tail] = set()
            for chain in self._chains:
                part = chain.groups[number]
                if chain.active:
                    named = [h.copies[TIER] for h in (*part.blocks, *part.aside, *part.tails)]
                    expected.update(named)
                    _check_active(part, self.block_size)
                require(tails.isdisjoint(part.tails), "INV-04: a tail belongs to two chains")
                tails.update(part.tails)
            require(
                group.pool.locked == len(expected)
                and all(slot.locks == count for slot, count in expected.items()),
                "INV-02: locks differ from the turns and copies in flight",
            )
        for chain in self._chains:
            fits = chain.length <= chain.capacity or not chain.active
            require(fits, "INV-03: committed tokens exceed the chain's blocks")

    def check_tokens(self, chain: Chain, tokens: "array[int]") -> None:
        """Verify that the chain's blocks hold the first tokens of its sequence."""
        size = self.block_size
        for part in chain.groups:
            for number, block in enumerate(part.blocks):
                run = tokens[number * size : (number + 1) * size].tobytes()
                require(block.tokens == run, f"INV-04: block {number} holds other tokens")

    def _shorten(self, found: list[Found], length: int, wanted: int) -> tuple[list[Found], int]:
        """Cut what every group found to `length`; return it and the slots missing to use it."""
        found = [f.shorten(length, self.block_size) for f in found]
        pairs = zip(found, self.pools, strict=True)
        return found, max(f.missing(pool, wanted) for f, pool in pairs)

    def _adopt(self, number: int, part: GroupChain, found: Found) -> int:
        pool = self._groups[number].pool
        index = self._groups[number].index
        part.blocks = found.blocks
        part.branch = None
        part.straight = True
        pool.lock_all(found.blocks)
        for block in found.blocks:
            if not block.indexed:
                index.intern(block)
        last = found.blocks[-1] if found.blocks else None
        source, count = found.source, found.count
        if isinstance(source, Tail):
            pool.lock(source)
            pool.rehang(source, last)
            source.valid_tokens = count
            pool.fill(source, count)
        else:
            _drop_tails(part, pool)
            if source is not None and not self._branch(number, part, source, count):
                count = 0
        return len(found.blocks) * self.block_size + count

    def _branch(self, number: int, part: GroupChain, source: Block, count: int) -> bool:
        """Start a tail with the first `count` tokens of `source`; False without room."""
        pool = self._groups[number].pool
        origin = pool.lock(source)
        tail = Tail(part.blocks[-1] if part.blocks else None, count)
        target = pool.take(tail)
        if isinstance(target, NoRoom):
            pool.unlock(origin)
            return False
        part.tails.append(tail)
        pool.lock(tail)  # once for the chain, once for the copy
        pool.fill(tail, count)
        self.copies.issue(number, origin, target, count)
        return True

    def _copy_tails(self, chain: Chain, child: Chain, count: int) -> bool:
        """Copy the tail's first `count` tokens in every group; False when one cannot be."""
        for number, (part, twig) in enumerate(zip(chain.groups, child.groups, strict=True)):
            if part.tail is None:
                return False
            if not self._branch(number, twig, part.tails[0], count):
                return False
            pool = self._groups[number].pool
            pool.unlock(twig.tails[0].copies[TIER])  # the child is idle: only the copy locks
        return True

    def _seal(self, chain: Chain, part: GroupChain, group: _Group, tokens: "array[int]") -> None:
        start = len(part.blocks) * self.block_size
        run = tokens[start : start + self.block_size].tobytes()
        parent = self._entry(part, group) if part.blocks else None
        block = group.index.seal(parent, run, chain.namespace)
        tail = part.tails.pop(0)
        tail.valid_tokens = 0
        group.pool.promote(tail, block)
        group.index.intern(block)
        part.blocks.append(block)
        if part.tails:
            group.pool.rehang(part.tails[0], block)

    def _entry(self, part: GroupChain, group: _Group) -> LogicalBlock:
        """Return what children of the last block hang from: its entry, kept locked if another."""
        last = part.blocks[-1]
        entry = group.index.intern(last)
        if entry is None or entry is last or TIER not in entry.copies:
            return last
        group.pool.lock(entry)
        part.aside.append(entry)
        part.straight = False
        return entry

    def _capacity(self, part: GroupChain) -> int:
        return (len(part.blocks) + len(part.tails)) * self.block_size

    def _measure(self, chain: Chain) -> None:
        chain.capacity = min(self._capacity(part) for part in chain.groups)


def _check_active(part: GroupChain, block_size: int) -> None:
    named = {h.copies[TIER] for h in (*part.blocks, *part.aside, *part.tails)}
    for slot in named:
        parent = slot.holder.parent if slot.holder is not None else None
        require(
            parent is None or parent.copies[TIER] in named,
            "INV-06: a locked block hangs from one that is not",
        )
    require(
        all(tail.valid_tokens < block_size for tail in part.tails),
        "INV-04: a full tail is not sealed",
    )


def _drop_tails(part: GroupChain, pool: BlockPool) -> None:
    for tail in part.tails:
        pool.drop(tail)
    part.tails = []
