"""Copies between slots that wait for a step or are in flight.

A copy locks its source and its target from `issue` until its ticket comes back (`settle`). Nothing
else is believed: a ticket that is unknown, or names slots that have had other holders since, is
counted as stale.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentserve.kv.blocks import BlockPool, Slot

DEVICE, HOST = "device", "host"
TIERS = (DEVICE, HOST)
ENDS = {"device": (DEVICE, DEVICE), "save": (DEVICE, HOST), "load": (HOST, DEVICE)}
OVERDUE_S = 30.0  # a copy takes milliseconds; after so long its completion is asked for again


@dataclass(slots=True)
class BlockCopy:
    """Copy the first `tokens` tokens of slot `source` to slot `target` in one KV group.

    `kind` is that of plan.Copy. `generations` are those of source and target when it was issued.
    """

    ticket: int
    kind: str
    group: int
    source: Slot
    target: Slot
    tokens: int
    generations: tuple[int, int]
    sent: bool = False  # a step took it
    sent_at: float = 0.0  # when that was, or when it was last asked for


class CopyQueue:
    """Owns the locks of the copies that it has issued, until their tickets come back."""

    def __init__(self, pools: Mapping[str, list[BlockPool]]) -> None:
        self._pools = pools
        self._waiting: list[BlockCopy] = []
        self._open: dict[int, BlockCopy] = {}
        self._ticket = 0
        self._looked_at = -1.0  # for overdue tickets; once a second is enough
        self.stale = 0
        self.counts = dict.fromkeys(ENDS, 0)  # open copies by kind

    def __bool__(self) -> bool:
        return bool(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, kind: str, group: int, ends: tuple[Slot, Slot], tokens: int) -> None:
        """Queue a copy between two slots; one lock of each passes to it."""
        source, target = ends
        self._ticket += 1
        generations = (source.generation, target.generation)
        copy = BlockCopy(self._ticket, kind, group, source, target, tokens, generations)
        target.arriving = True
        self._open[copy.ticket] = copy
        self._waiting.append(copy)
        self.counts[kind] += 1

    def take(self, now: float = 0.0) -> list[BlockCopy]:
        """Return the copies that wait for a step; they are in flight from now on."""
        copies, self._waiting = self._waiting, []
        for copy in copies:
            copy.sent, copy.sent_at = True, now
        return copies

    def overdue(self, now: float) -> list[int]:
        """Return the tickets that should have come back long ago; each again after a while."""
        if now < self._looked_at + 1.0:
            return []
        self._looked_at = now
        late = [c for c in self._open.values() if c.sent and now - c.sent_at >= OVERDUE_S]
        for copy in late:
            copy.sent_at = now
        return [copy.ticket for copy in late]

    def settle(self, tickets: Iterable[int]) -> None:
        """Unlock what finished copies named, and let what they filled be used."""
        for ticket in tickets:
            copy = self._open.get(ticket)
            if copy is None or not copy.sent:
                self.stale += 1
                continue
            del self._open[ticket]
            self.counts[copy.kind] -= 1
            if (copy.source.generation, copy.target.generation) != copy.generations:
                self.stale += 1
                continue
            copy.target.arriving = False
            source, target = ENDS[copy.kind]
            self._pools[source][copy.group].unlock(copy.source)
            self._pools[target][copy.group].unlock(copy.target)

    def locked(self, tier: str, group: int) -> list[Slot]:
        """Return the slots of a tier that copies of one group lock, one entry per lock."""
        slots: list[Slot] = []
        for copy in self._open.values():
            if copy.group == group:
                ends = zip(ENDS[copy.kind], (copy.source, copy.target), strict=True)
                slots += [slot for end, slot in ends if end == tier]
        return slots
