"""How much of a sequence's KV is still in some tier, and what it takes to use it."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from agentserve.kv.blocks import Block, BlockPool, LogicalBlock, Slot, Tail
from agentserve.kv.copies import DEVICE
from agentserve.kv.policy import Idle
from agentserve.kv.prefix import PrefixIndex
from agentserve.kv.tiers import ready


@dataclass(slots=True)
class GroupChain:
    """A sequence's blocks in one KV group.

    `branch` is a full block whose first tokens go on where `blocks` end: the chain was cut inside
    it. It is copied to a tail before anything is written. `aside` are entries that stand in for
    twins among `blocks`; `straight` says that each block hangs from the one before it.
    """

    blocks: list[LogicalBlock] = field(default_factory=list)
    tails: list[Tail] = field(default_factory=list)
    branch: LogicalBlock | None = None
    aside: list[LogicalBlock] = field(default_factory=list)
    straight: bool = True
    announced: int = 0  # entries of the block table that the runner knows
    taken: list[Slot] = field(default_factory=list)  # of the blocks that an active chain found

    @property
    def tail(self) -> Tail | None:
        """The tail after the last full block, if it is in some tier."""
        return self.tails[0] if self.tails and self.tails[0].copies else None

    @property
    def count(self) -> int:
        """How many blocks and tails there are."""
        return len(self.blocks) + len(self.tails)

    @property
    def last(self) -> Block | None:
        """The last of them."""
        return self.tails[-1] if self.tails else self.blocks[-1] if self.blocks else None

    def holders(self) -> list[Block]:
        """Return what its tokens are in, in token order."""
        return [*self.blocks, *self.tails]

    def slots(self, start: int = 0) -> list[Slot]:
        """Return the device slots of an active chain, in token order, from entry `start` on."""
        taken = len(self.taken)
        rest: list[Block] = [*self.blocks[max(start, taken) :]]
        rest += self.tails[max(0, start - len(self.blocks)) :]
        return [*self.taken[start:], *(holder.copies[DEVICE] for holder in rest)]


@dataclass(slots=True, eq=False)
class Chain:
    """The KV of one sequence. `length` tokens of it were computed and may still be in some tier.

    `arriving` names the slots, with their generation, that must have arrived before a step may use
    the chain. `saved` and `loaded` count the blocks that were copied for it.
    """

    namespace: str
    groups: list[GroupChain]
    idle: Idle
    length: int = 0
    active: bool = False
    acquired: int = 0  # length when it became active: what this turn did not compute
    from_host: int = 0  # tokens of those that had to be loaded
    lost: int = 0  # tokens that were computed before and were found no more
    dropped: bool = False  # given up on the client's word, and not computed since
    capacity: int = 0  # tokens that fit the blocks it has
    arriving: list[tuple[Slot, int]] = field(default_factory=list)
    saved: int = 0
    loaded: int = 0

    def await_slot(self, slot: Slot) -> None:
        """Let the chain wait for what a copy still fills, or still reads to fill another."""
        if slot.arriving:
            self.arriving.append((slot, slot.generation))

    def await_slots(self, slots: Iterable[Slot]) -> None:
        """Do so for each of them."""
        self.arriving += [(slot, slot.generation) for slot in slots if slot.arriving]

    @property
    def loading(self) -> bool:
        """Whether a step has to wait for copies."""
        if self.arriving:
            self.arriving = [
                (slot, generation)
                for slot, generation in self.arriving
                if slot.arriving and slot.generation == generation
            ]
        return bool(self.arriving)


@dataclass(slots=True)
class Found:
    """A prefix that is in some tier: full blocks, then the first `count` tokens of `source`.

    Each block hangs from the one before it in every tier that it is in, so that each tier has the
    first so many of them. The source is the chain's own tail, or a full block that has to be
    copied.
    """

    blocks: list[LogicalBlock]
    source: Block | None = None
    count: int = 0

    @property
    def is_copy(self) -> bool:
        """Whether the source belongs to others too."""
        return isinstance(self.source, LogicalBlock)

    def shorten(self, length: int, block_size: int) -> "Found":
        """Return the first `length` tokens of it."""
        full, rest = divmod(length, block_size)
        if full < len(self.blocks):
            return Found(self.blocks[:full], self.blocks[full] if rest else None, rest)
        return Found(self.blocks, self.source if rest else None, rest)

    def holders(self) -> list[Block]:
        """Return all that is read to use it."""
        return [*self.blocks] if self.source is None else [*self.blocks, self.source]

    def absent(self) -> int:
        """Return how many of its block table's entries need a device slot first."""
        blocks = len(self.blocks) - _leading(self.blocks, DEVICE)
        if self.source is None:
            return blocks
        return blocks + (self.is_copy or DEVICE not in self.source.copies)

    def missing(self, pool: BlockPool, wanted: int) -> int:
        """Return how many device slots are missing to `wanted` blocks once this is locked."""
        count = len(self.blocks) + (self.source is not None)
        new = wanted - (count - self.absent())
        if new <= pool.available - count:  # also if nothing of it is locked yet
            return 0
        holders = self.holders()
        here = [holder.copies[DEVICE] for holder in holders if DEVICE in holder.copies]
        newly_locked = sum(1 for slot in here if not slot.locks)
        return new - (pool.available - newly_locked)


def resident_tokens(chain: Chain, tier: str, block_size: int) -> int:
    """Return how many of the chain's tokens have a copy in a tier."""
    tokens = 0
    for holder in chain.groups[0].holders():
        if ready(holder.copies.get(tier)):
            full = isinstance(holder, LogicalBlock)
            tokens += block_size if full else holder.copies[tier].tokens
    return tokens


def find(
    part: GroupChain,
    index: PrefixIndex,
    namespace: str,
    tokens: "array[int]",
    block_size: int,
) -> Found:
    """Return the prefix of `tokens` that is in some tier, all but the last one at most.

    The chain's own blocks come first, each replaced by its entry in the index when that is
    another; then hits in the index; last a part of a block.
    """
    blocks = known(part, index)
    if len(blocks) < len(part.blocks):
        return Found(blocks)
    parent = blocks[-1] if blocks else None
    start = len(blocks) * block_size
    while start + block_size <= len(tokens):
        run = tokens[start : start + block_size].tobytes()
        entry = index.find(parent, run, namespace)
        if entry is None:
            break
        start += block_size
        if start == len(tokens):  # all is known: the last token is computed again
            return _whole(part, blocks, entry, block_size)
        blocks.append(entry)
        parent = entry
    if len(blocks) > len(part.blocks):
        return Found(blocks)
    if part.tail is not None:
        return Found(blocks, part.tail, part.tail.valid_tokens)
    if part.branch is not None and part.branch.copies and not part.branch.condemned:
        return Found(blocks, part.branch, _common(part.branch, tokens[start:-1]))
    return Found(blocks)


def known(part: GroupChain, index: PrefixIndex) -> list[LogicalBlock]:
    """Return the chain's leading blocks that can be used, as entries where there are any.

    Each hangs from the one before it in every tier that it is in.
    """
    last = part.blocks[-1] if part.blocks else None
    if last is not None and part.straight and index.reaches(last):
        return part.blocks.copy()  # in each tier a leaf goes before what it hangs from
    blocks: list[LogicalBlock] = []
    parent: LogicalBlock | None = None
    for block, after in zip(part.blocks, [*part.blocks[1:], part.tail], strict=False):
        entry = index.twin(parent, block)
        usable = block.copies and block.parent is parent and not block.condemned
        if usable and (entry is None or _holds_next(block, entry, after)):
            entry = block
        if entry is None:
            break
        blocks.append(entry)
        parent = entry
    return blocks


def _holds_next(twin: LogicalBlock, entry: LogicalBlock, after: Block | None) -> bool:
    """Whether what follows hangs from the twin, whose entry is not on the device.

    Then loading the entry would need a slot that the twin cannot give up.
    """
    if after is None or DEVICE in entry.copies:
        return False
    slot = after.copies.get(DEVICE)
    return slot is not None and slot.parent is twin


def line(part: GroupChain, index: PrefixIndex) -> list[Block]:
    """Return the usable blocks of an idle chain and its tail; each hangs from the one before."""
    blocks = known(part, index)
    if part.tail is None or len(blocks) < len(part.blocks):
        return [*blocks]
    part.tail.parent = blocks[-1] if blocks else None
    return [*blocks, part.tail]


def last_first(part: GroupChain, tier: str) -> Iterator[Block]:
    """Iterate from the last holder in `tier` to the first, without a look at those after it."""
    yield from [tail for tail in reversed(part.tails) if tier in tail.copies]
    end = len(part.blocks)
    if part.straight:  # each tier holds the first so many of them
        end = _leading(part.blocks, tier)
    for index in range(end - 1, -1, -1):
        yield part.blocks[index]


def _whole(
    part: GroupChain, blocks: list[LogicalBlock], last: LogicalBlock, block_size: int
) -> Found:
    tail = part.tail if len(blocks) == len(part.blocks) else None
    if tail is not None and tail.valid_tokens == block_size - 1:
        return Found(blocks, tail, tail.valid_tokens)
    return Found(blocks, last, block_size - 1)


def _leading(blocks: list[LogicalBlock], tier: str) -> int:
    """Return how many of `blocks` a tier has, where it has the first so many of them."""
    return bisect_left(blocks, True, key=lambda block: tier not in block.copies)


def _common(block: LogicalBlock, tokens: "array[int]") -> int:
    """Return how many of the first tokens are equal."""
    count = 0
    for ours, theirs in zip(tokens, array("i", block.tokens), strict=False):
        if ours != theirs:
            break
        count += 1
    return count
