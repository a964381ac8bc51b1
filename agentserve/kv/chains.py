"""Chains: which blocks hold the KV of each sequence, in every KV group.

A chain is the list of a sequence's full blocks, then tails: the first partly filled, the others
reserved for the rows of the next step. A chain is *active* while its turn runs; then, and only
then, it locks what it names. An idle chain locks nothing: what it names may be evicted, and is
looked up again, through the prefix index, when the next turn is admitted.

Two chains can compute equal blocks at once. The later copy stays unindexed, its *twin* is the
entry; children of either hang from the entry, so that others find them. The chain keeps the entry
locked (`aside`) and goes over to it at its next `acquire`.

The invariants are in `checks`.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from agentserve.kv.adoption import Adoption, drop_tails
from agentserve.kv.blocks import BlockPool, LogicalBlock, NoRoom, Tail, require
from agentserve.kv.checks import check_locks, check_owners
from agentserve.kv.copies import DEVICE, HOST, CopyQueue
from agentserve.kv.lookup import Chain, Found, GroupChain, find
from agentserve.kv.policy import Idle, Policy, make_policy
from agentserve.kv.prefix import PrefixIndex, sha256
from agentserve.kv.residency import Residency
from agentserve.kv.tiers import Group, on_device, ready

__all__ = ["Chain", "KvCache", "KvShape"]


@dataclass(frozen=True, slots=True)
class KvShape:
    """How much KV there can be. `identity` is the model's; blocks are those of each group."""

    identity: str
    num_blocks: int
    block_size: int  # tokens
    host_blocks: int = 0
    groups: int = 1


class KvCache:
    """Chains, pools and indexes of all KV groups, and the copies that wait or are in flight."""

    def __init__(
        self,
        shape: KvShape,
        policy: Policy | None = None,
        digest: Callable[[bytes], bytes] = sha256,
    ) -> None:
        policy = policy or make_policy("lru+host")
        self.block_size = shape.block_size
        self.num_blocks = shape.num_blocks
        host_blocks = shape.host_blocks if policy.uses_host else 0
        self._groups = [
            Group(
                PrefixIndex(shape.identity, digest), shape.block_size, shape.num_blocks, host_blocks
            )
            for _ in range(shape.groups)
        ]
        self.copies = CopyQueue({DEVICE: self.pools, HOST: self.host_pools})
        self.residency = Residency(self._groups, self.copies, policy)
        self._adoption = Adoption(self._groups, self.copies, self.residency)
        self._chains = self.residency.chains

    @property
    def pools(self) -> list[BlockPool]:
        """The device's pool of each KV group."""
        return [group.device for group in self._groups]

    @property
    def host_pools(self) -> list[BlockPool]:
        """The host's pool of each KV group."""
        return [group.host for group in self._groups]

    @property
    def releases(self) -> int:
        """A number that changes whenever room may have grown."""
        return sum(pool.releases for group in self._groups for pool in group.pools)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def is_on_device(self, chain: Chain) -> bool:
        """Whether nothing of an idle chain would have to be loaded or computed again."""
        last = chain.groups[0].last
        return last is not None and on_device(last)

    def has_free(self, chain: Chain, length: int) -> bool:
        """Whether an active chain can grow to `length` tokens at no open sequence's cost."""
        wanted = self.blocks_for(length)
        return all(
            self.residency.make_room(number, wanted - part.count, evict=False)
            for number, part in enumerate(chain.groups)
        )

    def open(self, namespace: str) -> Chain:
        """Return an empty chain."""
        chain = Chain(namespace, [GroupChain() for _ in self._groups], Idle(namespace, 0.0))
        self._chains[chain] = None
        return chain

    def close(self, chain: Chain) -> None:
        """Forget the chain; its tail is freed, its full blocks stay for others to find."""
        self.release(chain)
        self.residency.started(chain)
        for part, group in zip(chain.groups, self._groups, strict=True):
            drop_tails(part, group)
            group.disown(reversed(part.blocks))
            part.blocks = []
        self._chains.pop(chain, None)

    def cut(self, chain: Chain, keep: int) -> None:
        """Shorten an idle chain to at most `keep` tokens. Copies nothing yet."""
        require(not chain.active, "INV-10: a running chain is cut")
        if keep >= chain.length:
            return
        chain.length = keep
        full, rest = divmod(keep, self.block_size)
        for part, group in zip(chain.groups, self._groups, strict=True):
            if full < len(part.blocks):
                drop_tails(part, group)
                part.branch = part.blocks[full] if rest else None
                gone = part.blocks[full:]
                del part.blocks[full:]
                group.disown(reversed(gone))
            elif not rest:
                drop_tails(part, group)
                part.branch = None
            elif part.tail is not None:
                group.trim(part.tail, rest)

    def fork(self, chain: Chain, keep: int) -> Chain:
        """Return an idle chain with the first `keep` tokens; full blocks are shared, a tail copied.

        Without room for the tail's copy the fork is shorter, down to its last full block.
        """
        child = self.open(chain.namespace)
        child.length = min(keep, chain.length)
        child.dropped = chain.dropped
        full, rest = divmod(child.length, self.block_size)
        for part, twig, group in zip(chain.groups, child.groups, self._groups, strict=True):
            twig.blocks = part.blocks[:full]
            group.own(twig.blocks)
            twig.straight = part.straight
            if rest:
                twig.branch = part.blocks[full] if full < len(part.blocks) else part.branch
        if (
            rest
            and child.groups[0].branch is None
            and not self._adoption.copy_tails(chain, child, rest)
        ):
            self.cut(child, full * self.block_size)
        self.residency.ended(child)
        return child

    def acquire(
        self, chain: Chain, tokens: "array[int]", headroom: int = 0, *, evict: bool = True
    ) -> int | NoRoom:
        """Make `chain` active for a turn over `tokens` and return how many of them have KV.

        At most len(tokens) - 1, so that there is a row to sample from. Locks the prefix that is in
        some tier, goes on by prefix hits, copies what it needs of a block that it shares, and loads
        in token order what is in the host tier only: until that has arrived (`chain.loading`) no
        step may name the chain. NoRoom, and nothing locked, unless there is room for all of
        `tokens` with `headroom` blocks left over; without `evict`, no open sequence loses anything.
        """
        require(not chain.active, "INV-10: a running chain is acquired")
        before = min(chain.length, len(tokens) - 1)
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
        if not self._adoption.make_room(found, evict=evict):
            return NoRoom(wanted, 0)
        self.residency.started(chain)
        chain.active = True
        chain.from_host = 0
        for number in range(len(self._groups)):
            length = min(length, self._adoption.adopt(number, chain, found[number]))
        chain.length = chain.acquired = length
        chain.lost = max(0, before - length)
        self._measure(chain)
        return length

    def reserve(self, chain: Chain, length: int) -> NoRoom | None:
        """Give an active chain blocks for its first `length` tokens; None when it has them.

        On NoRoom it keeps what it got.
        """
        if length <= chain.capacity:
            return None
        missing: NoRoom | None = None
        for number, group in enumerate(self._groups):
            part = chain.groups[number]
            new = self.blocks_for(length) - len(part.blocks) - len(part.tails)
            self.residency.make_room(number, new)
            while missing is None and self._capacity(part) < length:
                first = part.blocks[-1] if part.blocks and not part.tails else None
                tail = Tail(first)
                slot = group.device.take(tail)
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
                group.device.fill(part.tails[0], rest)
                part.tails[0].valid_tokens = rest
        chain.length = length

    def announce(self, chain: Chain) -> list[list[int]]:
        """Return per group the slot numbers that joined the block table since the last call."""
        news: list[list[int]] = []
        for part in chain.groups:
            known, part.announced = part.announced, part.count
            news.append([slot.number for slot in part.slots(known)])
        return news

    def release(self, chain: Chain) -> None:
        """End the turn: unlock everything, give back reserved blocks. Does nothing when idle."""
        if not chain.active:
            return
        chain.active = False
        chain.capacity = 0
        chain.arriving.clear()
        for part, group in zip(chain.groups, self._groups, strict=True):
            aside = (entry.copies[DEVICE] for entry in part.aside)
            group.device.unlock_all([*part.slots(), *aside])
            part.taken = []
            part.aside.clear()
            part.announced = 0
            for tail in part.tails:
                if not tail.valid_tokens:
                    group.drop(tail)
            part.tails = [tail for tail in part.tails if tail.valid_tokens]
        chain.idle.tokens = chain.length
        self.residency.ended(chain)

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
                for pool in group.pools:
                    slot = block.copies.get(pool.tier)
                    if slot is not None and slot.evictable:
                        pool.drop(block)

    def check(self) -> None:
        """Verify the invariants of kv; cost grows with pools and chains. Raises InvariantError."""
        for number, group in enumerate(self._groups):
            group.index.check()
            for pool in group.pools:
                pool.check()
            check_locks(number, group, self._chains, self.copies)
            check_owners(number, self._chains)
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

    def _seal(self, chain: Chain, part: GroupChain, group: Group, tokens: "array[int]") -> None:
        start = len(part.blocks) * self.block_size
        run = tokens[start : start + self.block_size].tobytes()
        parent = self._entry(part, group) if part.blocks else None
        block = group.index.seal(parent, run, chain.namespace)
        tail = part.tails.pop(0)
        tail.valid_tokens = 0
        group.device.promote(tail, block)
        group.index.intern(block)
        part.blocks.append(block)
        block.owners += 1
        if part.tails:
            part.tails[0].parent = block
            group.device.rehang(part.tails[0], block)

    def _entry(self, part: GroupChain, group: Group) -> LogicalBlock:
        """Return what children of the last block hang from: its entry, kept locked if another."""
        last = part.blocks[-1]
        entry = group.index.intern(last)
        if entry is None or entry is last or not ready(entry.copies.get(DEVICE)):
            return last
        group.device.lock(entry)
        part.aside.append(entry)
        part.straight = False
        return entry

    def _capacity(self, part: GroupChain) -> int:
        return (len(part.blocks) + len(part.tails)) * self.block_size

    def _measure(self, chain: Chain) -> None:
        chain.capacity = min(self._capacity(part) for part in chain.groups)
