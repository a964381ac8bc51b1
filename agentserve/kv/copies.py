"""Copies between slots that wait for a step or are in flight."""

from collections.abc import Iterable
from dataclasses import dataclass

from agentserve.kv.blocks import BlockPool, Slot


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `tokens` tokens of slot `source` to slot `target` in one KV group."""

    ticket: int
    group: int
    source: Slot
    target: Slot
    tokens: int


class CopyQueue:
    """Owns the locks of the copies that it has issued, until their tickets come back."""

    def __init__(self, pools: list[BlockPool]) -> None:
        self._pools = pools
        self._waiting: list[BlockCopy] = []
        self._open: dict[int, BlockCopy] = {}
        self._ticket = 0
        self.stale = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def issue(self, group: int, source: Slot, target: Slot, tokens: int) -> None:
        """Queue a copy; one lock of both slots passes to it."""
        self._ticket += 1
        copy = BlockCopy(self._ticket, group, source, target, tokens)
        self._open[copy.ticket] = copy
        self._waiting.append(copy)

    def take(self) -> list[BlockCopy]:
        """Return the copies that wait for a step; they are in flight from now on."""
        copies, self._waiting = self._waiting, []
        return copies

    def settle(self, tickets: Iterable[int]) -> None:
        """Unlock what finished copies named. Unknown tickets are counted, not trusted."""
        for ticket in tickets:
            copy = self._open.pop(ticket, None)
            if copy is None:
                self.stale += 1
                continue
            self._pools[copy.group].unlock(copy.source)
            self._pools[copy.group].unlock(copy.target)

    def locked(self, group: int) -> list[Slot]:
        """Return the slots that copies of one group lock, one entry per lock."""
        copies = [copy for copy in self._open.values() if copy.group == group]
        return [slot for copy in copies for slot in (copy.source, copy.target)]
