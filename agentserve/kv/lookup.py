"""How much of a sequence's KV is still resident, and what it takes to use it."""

from array import array
from dataclasses import dataclass, field

from agentserve.kv.blocks import Block, BlockPool, LogicalBlock, Tail
from agentserve.kv.prefix import PrefixIndex

TIER = "device"


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

    @property
    def tail(self) -> Tail | None:
        """The tail after the last full block, if it is resident."""
        return self.tails[0] if self.tails and self.tails[0].copies else None


@dataclass(slots=True)
class Found:
    """A resident prefix: full blocks, then the first `count` tokens of `source`.

    The source is the chain's own tail, or a full block that has to be copied.
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

    def missing(self, pool: BlockPool, wanted: int) -> int:
        """Return how many slots are missing to `wanted` blocks once all of this is locked."""
        held = len(self.blocks) + (self.source is not None)
        new = wanted - held + self.is_copy
        if new <= pool.available - held:  # also if nothing of it is locked yet
            return 0
        holders: list[Block] = [*self.blocks]
        if self.source is not None:
            holders.append(self.source)
        newly_locked = sum(1 for holder in holders if not holder.copies[TIER].locks)
        return new - (pool.available - newly_locked)


def find(
    part: GroupChain,
    index: PrefixIndex,
    namespace: str,
    tokens: "array[int]",
    block_size: int,
) -> Found:
    """Return the resident prefix of `tokens`, at most all but the last one. Locks nothing.

    The chain's own blocks come first, each replaced by its entry in the index when that is
    another; then hits in the index; last a part of a block.
    """
    blocks = _own(part, index)
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


def _own(part: GroupChain, index: PrefixIndex) -> list[LogicalBlock]:
    """Return the chain's leading blocks that can be used, as entries where there are any."""
    last = part.blocks[-1] if part.blocks else None
    if last is not None and last.indexed and part.straight and not index.condemned:
        return part.blocks.copy()  # a leaf is evicted before what it hangs from: all is resident
    blocks: list[LogicalBlock] = []
    parent: LogicalBlock | None = None
    for block in part.blocks:
        entry = index.twin(parent, block)
        if entry is None and block.copies and block.parent is parent and not block.condemned:
            entry = block
        if entry is None:
            break
        blocks.append(entry)
        parent = entry
    return blocks


def _whole(
    part: GroupChain, blocks: list[LogicalBlock], last: LogicalBlock, block_size: int
) -> Found:
    tail = part.tail if len(blocks) == len(part.blocks) else None
    if tail is not None and tail.valid_tokens == block_size - 1:
        return Found(blocks, tail, tail.valid_tokens)
    return Found(blocks, last, block_size - 1)


def _common(block: LogicalBlock, tokens: "array[int]") -> int:
    """Return how many of the first tokens are equal."""
    count = 0
    for ours, theirs in zip(tokens, array("i", block.tokens), strict=False):
        if ours != theirs:
            break
        count += 1
    return count
