"""Logical blocks, and the pools whose slots hold copies of them.

A *logical block* is the immutable record of one full run of tokens; it has at most one copy per
tier. A *tail* is the private, still growing run at the end of one sequence. A *slot* is the memory
of one block in one tier. Sequences name blocks and tails; slot numbers exist only in step plans.
A block is *owned* while an open sequence names it.

Invariants, verified by `BlockPool.check`:
 1. Each slot is free (no holder), cached (a holder, no locks) or locked; the three counts add up
    to the total (INV-01), and the free list names each free slot once (INV-02).
 2. Holder and slot name each other (INV-02).
 3. What a holder's slot hangs from is resident in the same tier, and a slot's dependents are the
    slots that hang from it (INV-02).
 4. Every evictable slot (cached, without dependents) that nobody owns is queued for eviction; the
    owned ones are found through the sequences that name them (INV-06).
 5. The sum of filled tokens is exact; no slot holds more than a block (INV-03).

Only the pool changes lock counts. What `take` and `lock` return must be given back by `unlock`.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class InvariantError(Exception):
    """The state contradicts an invariant: a bug in agentserve, never the fault of a request."""


def require(condition: bool, message: str) -> None:
    """Raise InvariantError with `message` unless `condition` holds."""
    if not condition:
        raise InvariantError(message)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The answer when a slot is wanted and every one is locked or holds what a locked one needs."""

    wanted: int
    available: int


class Block:
    """What can hold a slot: a place in a sequence that hangs from `parent`, with its copies."""

    __slots__ = ("copies", "owners", "parent")

    def __init__(self, parent: "LogicalBlock | None") -> None:
        self.parent = parent
        self.owners = 0  # open sequences that name it
        self.copies: dict[str, Slot] = {}  # at most one per tier


class LogicalBlock(Block):
    """One full run of tokens, identified by its content and all that came before it.

    `tokens` are packed int32. `indexed` and `condemned` belong to the prefix index: a condemned
    block was written by a step that failed and is never matched again.
    """

    __slots__ = ("condemned", "digest", "identity", "indexed", "namespace", "tokens")

    def __init__(
        self,
        parent: "LogicalBlock | None",
        tokens: bytes,
        namespace: str,
        identity: str,
        digest: bytes,
    ) -> None:
        super().__init__(parent)
        self.tokens = tokens
        self.namespace = namespace
        self.identity = identity
        self.digest = digest
        self.indexed = False
        self.condemned = False


class Tail(Block):
    """The mutable run of one sequence after its last full block; `valid_tokens` have KV."""

    __slots__ = ("valid_tokens",)

    def __init__(self, parent: LogicalBlock | None, valid_tokens: int = 0) -> None:
        super().__init__(parent)
        self.valid_tokens = valid_tokens
        self.owners = 1


class Slot:
    """Memory of one block. `generation` counts the holders that it has had.

    `parent` is what the holder hangs from in this tier. While `arriving`, a copy still fills it.
    """

    __slots__ = (
        "arriving",
        "dependents",
        "doomed",
        "generation",
        "holder",
        "last_used",
        "locks",
        "number",
        "parent",
        "queued",
        "tokens",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = 0
        self.holder: Block | None = None
        self.parent: LogicalBlock | None = None
        self.arriving = False
        self.locks = 0
        self.dependents = 0
        self.last_used = 0
        self.tokens = 0
        self.queued = False
        self.doomed = False  # freed at the last unlock: nobody wants the content any more

    @property
    def evictable(self) -> bool:
        """Whether the slot can be given to somebody else now."""
        return self.holder is not None and not self.locks and not self.dependents


class BlockPool:
    """The slots of one tier for one KV group. Evicts leaves first, then least recently used.

    By itself it evicts only what nobody owns; `evict` is for those who know the owners.
    """

    def __init__(
        self, tier: str, total: int, block_size: int, on_clear: Callable[[Block], None]
    ) -> None:
        self.tier = tier
        self.total = total
        self.block_size = block_size
        self.locked = 0
        self.tokens = 0  # filled tokens in slots that are not free
        self.evictions = 0
        self.releases = 0  # times that room may have grown; lets a waiter skip useless retries
        self._on_clear = on_clear
        self._slots = [Slot(number) for number in range(total)]
        self._free = list(reversed(range(total)))
        self._queue: list[tuple[int, int]] = []  # lazy heap of (last_used, number)
        self._tick = 0

    @property
    def free(self) -> int:
        """Slots without content."""
        return len(self._free)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The numbers of the slots without content."""
        return tuple(self._free)

    @property
    def cached(self) -> int:
        """Slots with content that nobody uses at the moment."""
        return self.total - len(self._free) - self.locked

    @property
    def available(self) -> int:
        """Slots that can be taken. While copies are in flight, their ancestors count too early."""
        return self.total - self.locked

    def take(self, holder: Block) -> Slot | NoRoom:
        """Give `holder` a slot, locked once; if none is free, evicts one that nobody owns."""
        if not self._free and not self.evict_unowned():
            return NoRoom(1, 0)
        slot = self._slots[self._free.pop()]
        slot.generation += 1
        slot.holder = holder
        slot.parent = holder.parent
        slot.locks = 1
        self.locked += 1
        holder.copies[self.tier] = slot
        self._hang(slot.parent)
        return slot

    def lock(self, holder: Block) -> Slot:
        """Lock the copy of `holder`, which must be resident."""
        return self.lock_all((holder,))[0]

    def lock_all(self, holders: Iterable[Block]) -> list[Slot]:
        """Lock the copies of `holders`, which must be resident, and return them."""
        tier, shared = self.tier, 0
        slots = [holder.copies[tier] for holder in holders]
        for slot in slots:
            if slot.locks:
                slot.locks += 1
                shared += 1
            else:
                slot.locks = 1
        self.locked += len(slots) - shared
        return slots

    def unlock(self, slot: Slot) -> None:
        """Give back one lock; the last one makes the slot cached, or free when it is doomed."""
        require(slot.locks > 0, f"INV-02: slot {slot.number} is unlocked more often than locked")
        slot.locks -= 1
        if slot.locks:
            return
        self.locked -= 1
        self.releases += 1
        slot.last_used = self._tick
        if slot.doomed:
            self._clear(slot)
        else:
            self._enqueue(slot)

    def unlock_all(self, slots: list[Slot]) -> None:
        """Give back one lock of each; from now on they count as used just now."""
        self._tick += 1
        tick, others = self._tick, 0
        for slot in slots:
            if slot.locks == 1 and slot.dependents and not slot.doomed:  # nearly all of a chain
                slot.locks = 0
                slot.last_used = tick
            else:
                self.unlock(slot)
                others += 1
        self.locked -= len(slots) - others
        self.releases += len(slots) - others

    def drop(self, holder: Block) -> None:
        """Free the copy of `holder`, if there is one: now, or at its last unlock."""
        slot = holder.copies.get(self.tier)
        if slot is None:
            return
        if slot.locks:
            slot.doomed = True
        else:
            self._clear(slot)

    def fill(self, holder: Block, tokens: int) -> None:
        """Note that the copy of `holder` holds `tokens` tokens."""
        slot = holder.copies[self.tier]
        self.tokens += tokens - slot.tokens
        slot.tokens = tokens

    def hand_over(self, old: Tail, new: Block) -> None:
        """Let the slot of `old` hold `new`, whose parent is resident."""
        slot = old.copies.pop(self.tier)
        slot.holder = new
        new.copies[self.tier] = slot
        self._move(slot, new.parent)

    def promote(self, tail: Tail, block: LogicalBlock) -> None:
        """Let the slot of `tail`, now full, hold `block`."""
        self.hand_over(tail, block)
        self.fill(block, self.block_size)

    def rehang(self, holder: Tail, parent: LogicalBlock | None) -> None:
        """Make the copy of a tail depend on `parent`, which is resident, instead."""
        self._move(holder.copies[self.tier], parent)

    def disowned(self, holder: Block) -> None:
        """Note that nobody owns `holder` any more: its copy may be evicted before others."""
        slot = holder.copies.get(self.tier)
        if slot is not None:
            self._enqueue(slot)

    def evict(self, holder: Block) -> None:
        """Give up the copy of `holder`, which must be evictable."""
        slot = holder.copies[self.tier]
        require(slot.evictable, f"INV-05: slot {slot.number} is evicted while it is needed")
        self.evictions += 1
        self._clear(slot)

    def evict_unowned(self) -> bool:
        """Evict the least recently used leaf that nobody owns; False when there is none."""
        while self._queue:
            last_used, number = heapq.heappop(self._queue)
            slot = self._slots[number]
            slot.queued = False
            if not slot.evictable or _owned(slot):
                continue
            if slot.last_used != last_used:  # used since it was queued
                self._enqueue(slot)
                continue
            self.evictions += 1
            self._clear(slot)
            return True
        return False

    def check(self) -> None:
        """Verify the invariants of this module; cost grows with the pool. Raises InvariantError."""
        slots = self._slots
        holders = [slot for slot in slots if slot.holder is not None]
        locked = sum(1 for slot in slots if slot.locks)
        require(
            sorted(self._free) == [slot.number for slot in slots if slot.holder is None],
            "INV-02: the free list and the slots without holder differ",
        )
        require(locked == self.locked, "INV-01: the count of locked slots is wrong")
        require(
            sum(slot.tokens for slot in slots) == self.tokens, "INV-03: filled tokens do not add up"
        )
        dependents = [0] * self.total
        for slot in holders:
            if slot.parent is not None:
                require(
                    self.tier in slot.parent.copies,
                    "INV-02: what a slot hangs from is not resident",
                )
                dependents[slot.parent.copies[self.tier].number] += 1
        for slot in slots:
            if fault := self._fault(slot, dependents[slot.number]):
                raise InvariantError(f"{fault} (slot {slot.number}, {self.tier})")

    def _fault(self, slot: Slot, dependents: int) -> str:
        """Return which invariant a slot breaks, or an empty string."""
        holder = slot.holder
        if slot.dependents != dependents:
            return "INV-02: the count of dependents is wrong"
        if holder is None:
            used = slot.locks or slot.tokens or slot.doomed or slot.arriving
            return "INV-02: a free slot is in use" if used else ""
        if holder.copies.get(self.tier) is not slot:
            return "INV-02: slot and holder do not name each other"
        if slot.tokens > self.block_size:
            return "INV-03: a slot is more than full"
        if slot.locks:
            return ""
        if slot.doomed:
            return "INV-02: a doomed slot was not freed"
        if slot.arriving:
            return "INV-05: a slot is filled and not locked"
        if not (slot.dependents or slot.queued or holder.owners):
            return "INV-06: a slot can never be evicted"
        return ""

    def _hang(self, parent: LogicalBlock | None) -> None:
        if parent is not None:
            parent.copies[self.tier].dependents += 1

    def _unhang(self, parent: LogicalBlock | None) -> None:
        if parent is not None:
            slot = parent.copies[self.tier]
            slot.dependents -= 1
            self._enqueue(slot)

    def _move(self, slot: Slot, parent: LogicalBlock | None) -> None:
        self._hang(parent)
        self._unhang(slot.parent)
        slot.parent = parent

    def _enqueue(self, slot: Slot) -> None:
        if not slot.queued and slot.evictable and not _owned(slot):
            slot.queued = True
            heapq.heappush(self._queue, (slot.last_used, slot.number))

    def _clear(self, slot: Slot) -> None:
        holder = slot.holder
        if holder is None:
            return
        self.fill(holder, 0)
        slot.holder = None
        slot.doomed = slot.arriving = False
        del holder.copies[self.tier]
        self._unhang(slot.parent)
        slot.parent = None
        self._free.append(slot.number)
        self.releases += 1
        self._on_clear(holder)


def _owned(slot: Slot) -> bool:
    return slot.holder is not None and slot.holder.owners > 0
