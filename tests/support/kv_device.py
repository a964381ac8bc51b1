"""Memory of both tiers as cells of (token, position), filled only as copies and steps say."""

from array import array
from dataclasses import dataclass

from agentserve.kv.blocks import LogicalBlock, NoRoom
from agentserve.kv.chains import Chain, KvCache
from agentserve.kv.copies import TIERS, BlockCopy
from agentserve.kv.tiers import ready

ENDS = {"device": ("device", "device"), "save": ("device", "host"), "load": ("host", "device")}


def tokens_of(numbers) -> "array[int]":
    return array("i", numbers)


@dataclass
class Flight:
    """A copy in flight, and what its source held when it began."""

    copy: BlockCopy
    content: list
    sent_at: float


class KvDevice:
    """Runs chains of one KvCache on simulated memory, and reads back what they name.

    A copy on the device runs when it is sent, as the rows of the same step need it. Saves and
    loads run when the test lets them `land`, in any order. `late` holds back the tickets of copies
    on the device too.
    """

    def __init__(self, kv: KvCache, *, late: bool = False) -> None:
        self.kv = kv
        self.now = 0.0
        self.late = late
        self.flights: list[Flight] = []
        self.empty = [None] * kv.block_size
        self.memory = {
            (pool.tier, group): [self.empty[:] for _ in range(pool.total)]
            for pools in (kv.pools, kv.host_pools)
            for group, pool in enumerate(pools)
        }

    # Copies

    def send(self) -> list[BlockCopy]:
        """Begin the copies that wait; those between the tiers before those on the device."""
        copies = self.kv.copies.take(self.now)
        for copy in sorted(copies, key=lambda copy: copy.kind == "device"):
            source, target = self._ends(copy)
            content = source[: copy.tokens]
            assert None not in content, "a copy reads what nobody wrote"
            target[:] = self.empty
            if copy.kind == "device":
                target[: copy.tokens] = content
            self.flights.append(Flight(copy, content, self.now))
        if not self.late:
            self.land_all("device")
        return copies

    def land(self, number: int = 0) -> BlockCopy:
        """End a copy in flight."""
        flight = self.flights.pop(number)
        copy = flight.copy
        source, target = self._ends(copy)
        assert source[: copy.tokens] == flight.content, "the source changed under a copy"
        if copy.kind != "device":
            assert target == self.empty, "the target was written under a copy"
            target[: copy.tokens] = flight.content
        self.kv.copies.settle([copy.ticket])
        return copy

    def land_all(self, *kinds: str, last_first: bool = False) -> None:
        """End the copies in flight, or those of some kinds."""
        order = range(len(self.flights))
        numbers = [n for n in order if not kinds or self.flights[n].copy.kind in kinds]
        if last_first:
            for number in reversed(numbers):
                self.land(number)
        else:
            for ended, number in enumerate(numbers):
                self.land(number - ended)

    def copy(self) -> None:
        """Do the copies that wait, to their end."""
        self.send()
        self.land_all()

    def step(self) -> list[BlockCopy]:
        """Begin what residency does by itself between steps."""
        self.now += 1.0
        self.kv.residency.begin_step(self.now, self.kv.residency._costs)
        self.kv.residency.pump()
        return self.send()

    def settle(self) -> None:
        """Let residency do all it wants to do."""
        self.step()
        while self.flights or self.kv.residency.pending:
            self.land_all()
            self.step()

    def poison(self) -> None:
        """Forget what free slots held."""
        for pools in (self.kv.pools, self.kv.host_pools):
            for group, pool in enumerate(pools):
                for slot in pool.free_slots:
                    self.memory[pool.tier, group][slot][:] = self.empty

    def _in_use(self, group: int) -> set[int]:
        """Return the device slots that saves in flight read and that loads fill."""
        copies = [flight.copy for flight in self.flights if flight.copy.group == group]
        read = {copy.source.number for copy in copies if copy.kind == "save"}
        return read | {copy.target.number for copy in copies if copy.kind == "load"}

    def _ends(self, copy: BlockCopy) -> tuple[list, list]:
        source, target = ENDS[copy.kind]
        return (
            self.memory[source, copy.group][copy.source.number],
            self.memory[target, copy.group][copy.target.number],
        )

    # Turns

    def admit(self, chain: Chain, log) -> "int | NoRoom":
        """Acquire, and while that needs saves first, let them happen; loads are begun only."""
        cached = self.kv.acquire(chain, log)
        while isinstance(cached, NoRoom) and self.kv.copies:
            self.copy()
            cached = self.kv.acquire(chain, log)
        self.send()
        return cached

    def write(self, chain: Chain, log, length: int, *, garbage: bool = False) -> bool:
        """Compute the KV of log[chain.length:length]; False without room."""
        assert not chain.loading, "a row names a chain that is still loading"
        if isinstance(self.kv.reserve(chain, length), NoRoom):
            return False
        self.send()
        for group in range(len(chain.groups)):
            table, memory = self.table(chain, group), self.memory["device", group]
            written = table[chain.length // self.kv.block_size : self.kv.blocks_for(length)]
            assert not self._in_use(group).intersection(written), "a row writes what a copy needs"
            for position in range(chain.length, length):
                number, place = divmod(position, self.kv.block_size)
                cell = ("garbage", position) if garbage else (log[position], position)
                memory[table[number]][place] = cell
        if not garbage:
            self.kv.commit(chain, log, length)
        return True

    def turn(self, chain: Chain, log) -> int:
        """Run one turn that computes all of `log`; return how many tokens were cached."""
        cached = self.admit(chain, log)
        assert not isinstance(cached, NoRoom)
        self.land_all()
        self.compute(chain, log)
        return cached

    def compute(self, chain: Chain, log) -> None:
        """Run an admitted turn to its end."""
        length = chain.length
        assert self.read(chain) == list(log[:length])
        while not self.write(chain, log, len(log)):
            assert self.kv.copies, "there is no room for a turn that was admitted"
            self.copy()
        assert self.read(chain) == list(log)
        self.end(chain)

    def end(self, chain: Chain) -> None:
        """End the turn."""
        self.now += 1.0
        chain.idle.since = self.now
        self.kv.release(chain)

    # Contents

    def table(self, chain: Chain, group: int = 0) -> list[int]:
        part = chain.groups[group]
        return [holder.copies["device"].number for holder in (*part.blocks, *part.tails)]

    def read(self, chain: Chain) -> list[int]:
        """Return the tokens that the KV of an active chain was computed from."""
        found = []
        for group in range(len(chain.groups)):
            memory = self.memory["device", group]
            cells = [cell for number in self.table(chain, group) for cell in memory[number]]
            cells = cells[: chain.length]
            assert None not in cells, f"nobody wrote what a chain names: {cells}"
            assert [cell[1] for cell in cells] == list(range(chain.length))
            found.append([cell[0] for cell in cells])
        assert all(tokens == found[0] for tokens in found)
        return found[0]

    def check_resident(self, chain: Chain, log) -> None:
        """Whatever of a chain has arrived in some tier holds the right tokens."""
        size = self.kv.block_size
        for group, part in enumerate(chain.groups):
            for number, holder in enumerate((*part.blocks, *part.tails)):
                for tier in TIERS:
                    slot = holder.copies.get(tier)
                    if slot is None or not ready(slot):
                        continue
                    count = size if isinstance(holder, LogicalBlock) else holder.valid_tokens
                    start = number * size
                    expected = [(log[p], p) for p in range(start, start + count)]
                    assert self.memory[tier, group][slot.number][:count] == expected, (
                        f"{tier} slot {slot.number} of group {group}"
                    )
