"""A device's memory as cells of (token, position), filled only as plans say."""

from array import array

from agentserve.kv.blocks import LogicalBlock, NoRoom
from agentserve.kv.chains import Chain, KvCache


def tokens_of(numbers) -> "array[int]":
    return array("i", numbers)


class KvDevice:
    """Runs chains of one KvCache on simulated memory, and reads back what they name."""

    def __init__(self, kv: KvCache) -> None:
        self.kv = kv
        self.memory = {number: [None] * kv.block_size for number in range(kv.pools[0].total)}

    def copy(self) -> None:
        """Do the copies that wait and settle them."""
        copies = self.kv.copies.take()
        for copy in copies:
            source = self.memory[copy.source.number]
            rest = [None] * (self.kv.block_size - copy.tokens)
            self.memory[copy.target.number] = source[: copy.tokens] + rest
        self.kv.copies.settle([copy.ticket for copy in copies])

    def write(self, chain: Chain, log, length: int, *, garbage: bool = False) -> bool:
        """Compute the KV of log[chain.length:length]; False without room."""
        if isinstance(self.kv.reserve(chain, length), NoRoom):
            return False
        self.copy()
        for position in range(chain.length, length):
            number, place = divmod(position, self.kv.block_size)
            cell = ("garbage", position) if garbage else (log[position], position)
            self.memory[self.table(chain)[number]][place] = cell
        if not garbage:
            self.kv.commit(chain, log, length)
        return True

    def table(self, chain: Chain) -> list[int]:
        part = chain.groups[0]
        return [holder.copies["device"].number for holder in (*part.blocks, *part.tails)]

    def read(self, chain: Chain) -> list[int]:
        """Return the tokens that the KV of an active chain was computed from."""
        cells = [cell for number in self.table(chain) for cell in self.memory[number]]
        cells = cells[: chain.length]
        assert [cell[1] for cell in cells] == list(range(chain.length))
        return [cell[0] for cell in cells]

    def check_resident(self, chain: Chain, log) -> None:
        """Whatever of an idle or active chain is resident holds the right tokens."""
        part = chain.groups[0]
        size = self.kv.block_size
        for number, holder in enumerate((*part.blocks, *part.tails)):
            slot = holder.copies.get("device")
            if slot is None:
                continue
            count = size if isinstance(holder, LogicalBlock) else holder.valid_tokens
            start = number * size
            expected = [(log[p], p) for p in range(start, start + count)]
            assert self.memory[slot.number][:count] == expected

    def turn(self, chain: Chain, log) -> int:
        """Run one turn that computes all of `log`; return how many tokens were cached."""
        cached = self.kv.acquire(chain, log)
        assert not isinstance(cached, NoRoom)
        self.copy()
        assert self.read(chain) == list(log[:cached])
        assert self.write(chain, log, len(log))
        assert self.read(chain) == list(log)
        self.kv.release(chain)
        return cached
