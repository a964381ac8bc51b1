"""One KV group's pools, by tier, and its prefix index."""

from collections.abc import Iterable

from agentserve.kv.blocks import Block, BlockPool, LogicalBlock, Slot, Tail
from agentserve.kv.copies import DEVICE, HOST
from agentserve.kv.prefix import PrefixIndex


class Group:
    """Pools and index of one KV group. Without a host tier `host` has no slots."""

    def __init__(
        self,
        index: PrefixIndex,
        block_size: int,
        num_blocks: int,
        host_blocks: int,
    ) -> None:
        self.index = index
        self.device = BlockPool(DEVICE, num_blocks, block_size, index.cleared)
        self.host = BlockPool(HOST, host_blocks, block_size, index.cleared)
        self.pools = (self.device, self.host)

    def own(self, blocks: Iterable[LogicalBlock]) -> None:
        """Note that one more sequence names `blocks`."""
        for block in blocks:
            block.owners += 1

    def disown(self, blocks: Iterable[LogicalBlock]) -> None:
        """Note that one sequence less names `blocks`."""
        for block in blocks:
            block.owners -= 1
            if not block.owners:
                for pool in self.pools:
                    pool.disowned(block)

    def drop(self, holder: Block) -> None:
        """Free every copy of `holder`: now, or at its last unlock."""
        for pool in self.pools:
            pool.drop(holder)

    def trim(self, tail: Tail, tokens: int) -> None:
        """Shorten a tail to `tokens` tokens, in every tier."""
        tail.valid_tokens = tokens
        for pool in self.pools:
            slot = tail.copies.get(pool.tier)
            if slot is not None:
                pool.fill(tail, min(tokens, slot.tokens))


def on_device(holder: Block) -> bool:
    """Whether it has a slot on the device, be it still arriving."""
    return DEVICE in holder.copies


def ready(slot: Slot | None) -> bool:
    """Whether a slot is there and no copy still fills it."""
    return slot is not None and not slot.arriving
