"""From the rows of a plan to the tensors of one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from agentserve_kernels.tensors import Chunk, DecodeRows, Placement
from numpy.typing import NDArray

from agentserve.engine.plan import Row


@dataclass(frozen=True)
class Step:
    """One batch of T tokens: single-token rows and chunks, mixed.

    tokens: int64 [T]; tables: int32 [slots, blocks a sequence]; sampled: int64 [S], the rows whose
    logits are wanted. Every row belongs to `decode` or to one of `chunks`.
    """

    tokens: torch.Tensor
    place: Placement
    tables: torch.Tensor
    decode: DecodeRows
    chunks: list[Chunk]
    sampled: torch.Tensor


def build_step(
    rows: list[Row], tokens: NDArray[np.int32], tables: torch.Tensor, block_size: int
) -> Step:
    """Lay out the rows (at least one) one after the other.

    `tokens` are those of all rows, int32 [T]; `tables` cover each row's last position.
    """
    slots, starts, counts = np.array([(r.slot, r.start, r.count) for r in rows], np.int64).T
    ends = np.cumsum(counts)
    firsts = ends - counts
    slots = np.repeat(slots, counts)
    positions = np.arange(tokens.size) + np.repeat(starts - firsts, counts)
    blocks = tables.numpy()[slots, positions // block_size].astype(np.int64)
    single = firsts[counts == 1]
    chunks = [
        Chunk(slot=row.slot, row=first, start=row.start, count=row.count)
        for row, first in zip(rows, firsts.tolist(), strict=True)
        if row.count > 1
    ]
    return Step(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        place=Placement(torch.from_numpy(positions), torch.from_numpy(blocks)),
        tables=tables,
        decode=DecodeRows(
            rows=torch.from_numpy(single),
            slots=torch.from_numpy(slots[single]),
            lengths=torch.from_numpy(positions[single] + 1),
        ),
        chunks=chunks,
        sampled=torch.from_numpy(ends[[row.sample for row in rows]] - 1),
    )
