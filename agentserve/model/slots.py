"""The batch slots of a runner, on the host: who holds them, and the block table of each."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from agentserve.engine.plan import StepPlan


@dataclass(frozen=True)
class TableWrites:
    """Entries that a plan has changed: places in the flattened tables, int64, and blocks, int32."""

    places: NDArray[np.int64]
    blocks: NDArray[np.int32]


class Slots:
    """`tables` are int32 [slots, blocks a sequence]; what lies behind a sequence's end is stale."""

    def __init__(self, count: int, width: int) -> None:
        self.tables = torch.zeros((count, width), dtype=torch.int32)
        self._width = width
        self._generations: dict[int, int] = {}
        self._lengths: dict[int, int] = {}  # blocks

    def update(self, plan: StepPlan) -> TableWrites:
        """Apply what the plan says of slots and tables; return what became of the tables.

        Raises ValueError when a drop names another generation than the slot holds.
        """
        for drop in plan.dropped:
            held = self._generations.pop(drop.slot)
            if held != drop.generation:
                raise ValueError(f"slot {drop.slot} holds generation {held}: {drop}")
        for add in plan.added:
            self._generations[add.slot] = add.generation
            self._lengths[add.slot] = 0
        places: list[int] = []
        blocks: list[int] = []
        for append in plan.appended:
            first = append.slot * self._width + self._lengths[append.slot]
            places += range(first, first + len(append.blocks))
            blocks += append.blocks
            self._lengths[append.slot] += len(append.blocks)
        writes = TableWrites(np.array(places, np.int64), np.array(blocks, np.int32))
        self.tables.view(-1).numpy()[writes.places] = writes.blocks
        return writes
