"""How a chain takes what was found of its KV: what is locked, loaded, and copied."""

from agentserve.kv.blocks import Block, BlockPool, NoRoom, Slot, Tail, require
from agentserve.kv.copies import DEVICE, HOST, CopyQueue
from agentserve.kv.lookup import Chain, Found, GroupChain
from agentserve.kv.residency import Residency
from agentserve.kv.tiers import Group, on_device, ready


class Adoption:
    """Serves the chains of one KvCache."""

    def __init__(self, groups: list[Group], copies: CopyQueue, residency: Residency) -> None:
        self._groups = groups
        self._copies = copies
        self._residency = residency

    def make_room(self, found: list[Found], *, evict: bool) -> bool:
        """Free the device slots that `found` needs at once, at the cost of nothing in it.

        Without `evict`, one more too, and at the cost of no open sequence.
        """
        wanted = [f.absent() + (not evict) for f in found]
        pairs = zip(self._groups, wanted, strict=True)
        if all(group.device.free >= count for group, count in pairs):
            return True
        held: list[tuple[BlockPool, Block]] = []
        for group, f in zip(self._groups, found, strict=True):
            held += [(p, h) for h in f.holders() for p in group.pools if p.tier in h.copies]
        for pool, holder in held:
            pool.lock(holder)
        fits = all(
            self._residency.make_room(number, count, evict=evict)
            for number, count in enumerate(wanted)
        )
        for pool, holder in held:
            pool.unlock(holder.copies[pool.tier])
        return fits

    def adopt(self, number: int, chain: Chain, found: Found) -> int:
        """Let an active chain take what was found of one group; return how many tokens it got."""
        part, group = chain.groups[number], self._groups[number]
        if found.blocks != part.blocks:
            group.own(found.blocks)
            group.disown(reversed(part.blocks))
        part.blocks = found.blocks
        part.branch = None
        part.straight = True
        source, count = found.source, found.count
        tail = source if isinstance(source, Tail) else None
        if not found.blocks or on_device(found.blocks[-1]):  # then all of them are
            part.taken = group.device.lock_all(found.blocks)
            if self._copies:  # else nothing arrives
                chain.await_slots(part.taken)
        else:
            part.taken = [self._bring(chain, number, block) for block in found.blocks]
        if tail is not None:
            self._bring(chain, number, tail)
        if found.blocks and not group.index.reaches(found.blocks[-1]):
            for block in found.blocks:
                group.index.intern(block)
        if tail is not None:
            group.trim(tail, count)
            group.host.drop(tail)  # it goes stale with the first token that is written
            if ready(tail.copies.get(HOST)):  # a load reads it: it is nobody's from now on
                part.tails[0] = Tail(tail.parent, count)
                group.device.hand_over(tail, part.tails[0])
        else:
            drop_tails(part, group)
            if source is not None and not self._branch(number, chain, part, source, count):
                count = 0
        return len(found.blocks) * group.device.block_size + count

    def _bring(self, chain: Chain, number: int, holder: Block) -> Slot:
        """Lock a block or tail of an active chain on the device, loading it if it is not there."""
        group = self._groups[number]
        part = chain.groups[number]
        if isinstance(holder, Tail):
            holder.parent = part.blocks[-1] if part.blocks else None
            if HOST in holder.copies:  # nothing is written to what a save still reads
                chain.await_slot(holder.copies[HOST])
        if on_device(holder):
            slot = group.device.lock(holder)
            if isinstance(holder, Tail):
                group.device.rehang(holder, holder.parent)
        else:
            require(self._residency.load(chain, number, holder), "INV-06: no room to load")
            slot = holder.copies[DEVICE]
            chain.from_host += slot.tokens if number == 0 else 0
        chain.await_slot(slot)
        return slot

    def _branch(
        self, number: int, chain: Chain, part: GroupChain, source: Block, count: int
    ) -> bool:
        """Start a tail with the first `count` tokens of `source`; False without room."""
        group = self._groups[number]
        here = ready(source.copies.get(DEVICE))
        pool = group.device if here else group.host
        if not ready(source.copies.get(pool.tier)):
            return False
        origin = pool.lock(source)
        tail = Tail(part.blocks[-1] if part.blocks else None, count)
        target = group.device.take(tail)
        if isinstance(target, NoRoom):
            pool.unlock(origin)
            return False
        part.tails.append(tail)
        group.device.lock(tail)  # once for the chain, once for the copy
        group.device.fill(tail, count)
        self._copies.issue("device" if here else "load", number, (origin, target), count)
        if not here:  # a copy on the device is done before the rows of the same step
            chain.from_host += count if number == 0 else 0
            chain.loaded += 1
            chain.await_slot(target)
        return True

    def copy_tails(self, chain: Chain, child: Chain, count: int) -> bool:
        """Copy the tail's first `count` tokens in every group; False when one cannot be."""
        for number, (part, twig) in enumerate(zip(chain.groups, child.groups, strict=True)):
            if part.tail is None or not self._residency.make_room(number, 1):
                return False
            parent = twig.blocks[-1] if twig.blocks else None
            if parent is not None and not on_device(parent):
                return False
            if not self._branch(number, child, twig, part.tails[0], count):
                return False
            device = self._groups[number].device
            device.unlock(twig.tails[0].copies[DEVICE])  # the child is idle: only the copy locks
        child.arriving.clear()
        return True


def drop_tails(part: GroupChain, group: Group) -> None:
    """Free the tails of a chain in every tier: now, or at their last unlock."""
    for tail in part.tails:
        group.drop(tail)
    part.tails = []
