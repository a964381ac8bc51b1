"""Residency: which blocks leave the device, which are copied to the host, which come back early.

One owner, the engine loop, calls this between steps. Nothing is evicted unless somebody needs the
space. Blocks that nobody owns go first, then those of idle chains in the policy's order, last
blocks first. What has a host copy is given up at once; what has none is saved first, while the host
has room for it, and lost when it has not.
"""

from bisect import bisect_left
from collections.abc import Callable

from agentserve.kv.blocks import Block, NoRoom, Tail
from agentserve.kv.copies import DEVICE, HOST, CopyQueue
from agentserve.kv.lookup import Chain, last_first, line
from agentserve.kv.policy import Costs, Policy
from agentserve.kv.tiers import Group, ready

SAVES_IN_FLIGHT = 16  # blocks; few, so that a load does not wait behind them
DEMAND_ROUNDS = 8
ORDER_AGE_S = 0.05  # the order of victims is found anew after so long; it costs some ms
ANNOUNCED_S = 30.0  # a turn that was announced and does not come protects its KV no longer
LOADS_AHEAD = 64  # blocks in flight for turns that were announced


class Residency:
    """Moves blocks of the chains in `chains` between the tiers of `groups`."""

    def __init__(self, groups: list[Group], copies: CopyQueue, policy: Policy) -> None:
        self.chains: dict[Chain, None] = {}  # no sets: what is done must not hang on addresses
        self.policy = policy
        self._groups = groups
        self._copies = copies
        self._unsaved: dict[Chain, None] = {}  # in the order in which their turns ended
        self._leaving: dict[Chain, None] = {}  # give up their device slots once they are saved
        self._promoted: dict[Chain, None] = {}
        self._announced: dict[Chain, float] = {}  # when the next turn was announced
        self._now = 0.0
        self._costs: Callable[[], Costs] = no_costs
        self._order: dict[Chain, None] | None = None  # idle chains, coldest first
        self._ordered_at = 0.0
        self._rounds = 0  # of saves on demand since they last made room
        self._full: dict[int, tuple[int, int]] = {}  # what could not be had, and when
        self._has_host = policy.uses_host and all(group.host.total for group in groups)

    @property
    def pending(self) -> bool:
        """Whether `pump` has something to do."""
        return bool(self._unsaved or self._leaving or self._promoted)

    def begin_step(self, now: float, costs: Callable[[], Costs]) -> None:
        """Take the clock's seconds and what tells the measured costs, for the policy."""
        self._now, self._costs = now, costs
        if now - self._ordered_at >= ORDER_AGE_S:
            self._order = None
            for chain, since in list(self._announced.items()):
                if now - since >= ANNOUNCED_S:
                    self.promote(chain, begin=False)

    def make_room(
        self, number: int, count: int, before: Chain | None = None, *, evict: bool = True
    ) -> bool:
        """Free slots of group `number` on the device until `count` are free; False if not now.

        Without `evict` no open sequence loses anything: only what nobody owns is given up.
        With `before`, only what the policy finds colder than that chain is given up, and nothing of
        a chain whose turn waits or was announced.
        """
        pool = self._groups[number].device
        if pool.free >= count:
            return True
        if evict and before is None:
            releases = sum(pool.releases for group in self._groups for pool in group.pools)
            failed, then = self._full.get(number, (0, -1))
            if releases == then and count >= failed:
                return False  # nothing has changed since so much could not be had
            self._full[number] = (count, releases)
        victims = self._victims(before) if evict else []
        if self._strip_all(victims, number, count, clean=self._has_host):
            self._rounds = 0
            return True
        if before is not None or not evict:
            return False
        if self._has_host and self._save_victims(victims, number, count - pool.free):
            return False
        if self._strip_all(victims, number, count, clean=False):
            # The host gave nothing: the next time, one round of saves is waited for.
            self._rounds = DEMAND_ROUNDS - 2
            return True
        return False

    def _save_victims(self, victims: list[Chain], number: int, count: int) -> bool:
        """Save what stands in the way of `count` free slots; False when it must be dropped.

        In a host that is nearly full two chains can take each other's room for ever, so after some
        rounds that gained nothing the rest is dropped (INV-06).
        """
        saves = self._copies.counts["save"]
        if self._rounds < DEMAND_ROUNDS:
            for chain in victims:
                if self._copies.counts["save"] >= count:
                    break
                if _gives(chain, number):
                    self._save(chain, demand=True)
            self._rounds += self._copies.counts["save"] > saves
        return self._rounds < DEMAND_ROUNDS and self._copies.counts["save"] > 0

    def ended(self, chain: Chain) -> None:
        """Note that `chain` is idle from now on, with KV left behind."""
        self.touch(chain)
        if not self.policy.keeps:
            for number, group in enumerate(self._groups):
                self._strip(chain, number, group.device.total, clean=False)
        elif self._has_host:
            self._unsaved[chain] = None
            chain.idle.clean = False

    def touch(self, chain: Chain) -> None:
        """Let `chain` be the last victim until the order is found anew."""
        if self._order is not None:
            self._order.pop(chain, None)
            self._order[chain] = None

    def spare(self, number: int) -> int:
        """Return about how many device slots cost nothing: free, or idle with a host copy."""
        pool = self._groups[number].device
        if not self._has_host:
            return pool.free
        dirty = sum(
            chain.groups[number].count
            for chain in self.chains
            if not chain.active and not chain.idle.clean
        )
        return pool.free + max(0, pool.cached - dirty)

    def started(self, chain: Chain) -> None:
        """Note that `chain` is active or closed: nothing is moved for it any more."""
        self._unsaved.pop(chain, None)
        self._promoted.pop(chain, None)
        self._announced.pop(chain, None)
        self._leaving.pop(chain, None)
        chain.idle.promoted = False

    def hint(self, chain: Chain) -> None:
        """Act on `chain.idle.kv`: "host" makes room as soon as all is saved, "drop" forgets it."""
        if chain.active:
            return
        self._leaving.pop(chain, None)
        if chain.idle.kv == "drop":
            self._unsaved.pop(chain, None)
            chain.dropped = True
            for number, group in enumerate(self._groups):
                self._strip(chain, number, group.device.total, clean=False, shared=False)
                self._strip_host(chain, number, group.host.total, doubles=False, shared=False)
        elif chain.idle.kv == "host" and self._has_host:
            self._unsaved[chain] = None
            self._leaving[chain] = None
        elif chain.idle.kv == "device":
            self.touch(chain)

    def promote(self, chain: Chain, *, begin: bool) -> None:
        """Bring an idle chain to the device, or stop doing so."""
        if chain.active or not self._has_host:
            return
        chain.idle.promoted = begin
        if begin:
            self._leaving.pop(chain, None)
            self._promoted[chain] = None
            self._announced[chain] = self._now
            self.touch(chain)
        else:
            self._promoted.pop(chain, None)
            self._announced.pop(chain, None)

    def pump(self) -> None:
        """Issue copies that nobody waits for: announced turns first, then saves."""
        for chain in list(self._promoted):
            if not self._load_ahead(chain):
                break
        if self._copies.counts["load"]:
            return
        for chain in list(self._unsaved):
            if not self._save(chain, demand=False):
                break
            del self._unsaved[chain]
        for chain in list(self._leaving):
            if chain not in self._unsaved and not self._copies.counts["save"]:
                self._leaving.pop(chain, None)
                for number, group in enumerate(self._groups):
                    self._strip(chain, number, group.device.total, clean=True, shared=False)

    def drop_host(self, choose: Callable[[list[Chain]], Chain]) -> bool:
        """Lose the last host copy of a chain, for tests of that; False when none can go."""
        chains = [chain for chain in self.chains if chain.groups[0].holders()]
        return bool(chains) and self._strip_host(choose(chains), 0, 1, doubles=False)

    # Victims

    def _victims(self, before: Chain | None) -> list[Chain]:
        """Return the idle chains, coldest first."""
        if self._order is None:
            chains = {id(chain.idle): chain for chain in self.chains if not chain.active}
            idle = self.policy.order((c.idle for c in chains.values()), self._now, self._costs())
            self._order = dict.fromkeys(chains[id(one)] for one in idle)
            self._ordered_at = self._now
        order = [chain for chain in self._order if not chain.active and chain in self.chains]
        if before is None:
            return order
        if before in order:
            order = order[: order.index(before)]
        return [chain for chain in order if not (chain.idle.queued or chain.idle.promoted)]

    def _strip_all(self, victims: list[Chain], number: int, count: int, *, clean: bool) -> bool:
        """Give up device slots until `count` are free; again while each pass frees some."""
        pool = self._groups[number].device
        while True:
            before = pool.evictions
            for chain in [None, *victims]:
                if chain is not None:
                    self._strip(chain, number, count, clean=clean)
                while pool.free < count and pool.evict_unowned():
                    pass
                if pool.free >= count:
                    return True
            if pool.evictions == before:
                return False

    def _strip(
        self, chain: Chain, number: int, count: int, *, clean: bool, shared: bool = True
    ) -> None:
        """Give up device slots of an idle chain, last first; with `clean`, only saved ones.

        Without `shared`, only what no other open chain names.
        """
        if chain.active:
            return
        pool = self._groups[number].device
        part = chain.groups[number]
        for holder in last_first(part, DEVICE):
            if pool.free >= count or (holder.owners > 1 and not shared):
                return
            slot = holder.copies.get(DEVICE)
            if slot is None:
                continue
            if slot.evictable and (_saved(holder) or not clean):
                pool.evict(holder)
            elif part.straight:  # else a twin that nothing hangs from can still come
                return

    # Host

    def _save(self, chain: Chain, *, demand: bool) -> bool:
        """Issue saves of what has no host copy; False when more have to wait for those in flight.

        On demand it may cost colder chains their last copies, and as many as needed are issued.
        """
        if chain.active:
            return True
        for number, group in enumerate(self._groups):
            blocks = line(chain.groups[number], group.index)
            for holder in blocks[_first_unsaved(blocks) :]:
                if HOST in holder.copies:
                    if holder.copies[HOST].doomed:  # stale, and a copy still fills it
                        return False
                    continue
                if not ready(holder.copies.get(DEVICE)):
                    return True
                if not demand and self._copies.counts["save"] >= SAVES_IN_FLIGHT:
                    return False
                if not self._save_block(chain, number, holder, demand=demand):
                    return True
        chain.idle.clean = True
        return True

    def _save_block(self, chain: Chain, number: int, holder: Block, *, demand: bool) -> bool:
        group = self._groups[number]
        parent = holder.parent
        if parent is not None:
            group.host.lock(parent)
        slot = group.host.take(holder)
        if isinstance(slot, NoRoom) and self._host_room(chain, number, demand=demand):
            slot = group.host.take(holder)
        if parent is not None:
            group.host.unlock(parent.copies[HOST])
        if isinstance(slot, NoRoom):
            return False
        tokens = holder.valid_tokens if isinstance(holder, Tail) else group.device.block_size
        group.host.fill(holder, tokens)
        self._copies.issue("save", number, (group.device.lock(holder), slot), tokens)
        chain.saved += 1
        return True

    def _host_room(self, chain: Chain, number: int, *, demand: bool) -> bool:
        """Free a host slot for `chain`: first copies of what is on the device too.

        Those of running chains are saved again when they end. On demand, copies of colder chains
        go as well: room in the host moves from colder to hotter ones only, so that this ends.
        """
        running = [other for other in self.chains if other.active]
        if any(self._strip_host(other, number, 1, doubles=True) for other in running):
            return True
        if not demand:
            return False
        colder = self._victims(chain)
        return any(
            self._strip_host(other, number, 1, doubles=doubles)
            for doubles in (True, False)
            for other in colder
        )

    def _strip_host(
        self, chain: Chain, number: int, count: int, *, doubles: bool, shared: bool = True
    ) -> bool:
        """Give up at most `count` host slots, last first; with `doubles`, only what is on both."""
        pool = self._groups[number].host
        given = 0
        for holder in last_first(chain.groups[number], HOST):
            slot = holder.copies.get(HOST)
            if slot is None:
                continue
            if given == count or not slot.evictable or (holder.owners > 1 and not shared):
                break
            if doubles and not ready(holder.copies.get(DEVICE)):
                break
            pool.evict(holder)
            given += 1
        if given:
            chain.idle.clean = False
        return given > 0

    # Promotion

    def _load_ahead(self, chain: Chain) -> bool:
        """Issue loads for a chain whose turn was announced; False when more have to wait."""
        for number, group in enumerate(self._groups):
            for holder in line(chain.groups[number], group.index):
                if DEVICE in holder.copies:
                    continue
                if self._copies.counts["load"] >= LOADS_AHEAD:
                    return False
                if not self.load(chain, number, holder, before=chain):
                    break
                group.device.unlock(holder.copies[DEVICE])  # idle chains lock nothing
        self._promoted.pop(chain, None)
        return True

    def load(
        self, chain: Chain, number: int, holder: Block, *, before: Chain | None = None
    ) -> bool:
        """Issue the load of a block that is in the host tier only; its new slot is locked once."""
        group = self._groups[number]
        group.host.lock(holder)  # room is not made at its own cost
        parent = holder.parent
        if parent is not None:
            group.device.lock(parent)
        slot = group.device.take(holder) if self.make_room(number, 1, before) else NoRoom(1, 0)
        if parent is not None:
            group.device.unlock(parent.copies[DEVICE])
        source = holder.copies[HOST]
        if isinstance(slot, NoRoom):
            group.host.unlock(source)
            return False
        group.device.fill(holder, source.tokens)
        group.device.lock(holder)
        self._copies.issue("load", number, (source, slot), source.tokens)
        chain.loaded += 1
        return True


def no_costs() -> Costs:
    """Return costs for when nothing was measured."""
    return Costs(0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)


def _gives(chain: Chain, number: int) -> bool:
    """Whether a block of the chain on the device could be evicted."""
    part = chain.groups[number]
    for holder in last_first(part, DEVICE):
        slot = holder.copies.get(DEVICE)
        if slot is not None and (slot.evictable or part.straight):
            return slot.evictable
    return False


def _saved(holder: Block) -> bool:
    slot = holder.copies.get(HOST)
    return slot is not None and not slot.arriving


def _first_unsaved(blocks: list[Block]) -> int:
    """Return the index of the first block without a host copy; those before it all have one."""

    def is_missing(block: Block) -> bool:
        slot = block.copies.get(HOST)
        return slot is None or slot.doomed

    return bisect_left(blocks, True, key=is_missing)
