"""Which decode rows begin with the same blocks, so that these are attended to once for all."""

from collections.abc import Iterator
from typing import Any

import numpy as np

MEMBERS = 5  # fewer rows fill a panel too little
TOKENS = 128  # of a prefix that is worth a task


def shared_prefixes(tables: Any, lengths: Any, block_size: int) -> Iterator[tuple[Any, int]]:
    """Yield (rows, tokens) of prefixes that several rows share; no row comes twice.

    tables: the rows' own block tables [N, blocks]; lengths: tokens to attend to, int64 [N].
    """
    least = -(-TOKENS // block_size)
    whole = (lengths - 1) // block_size  # the last token's block is nobody else's
    enough = np.flatnonzero(whole >= least)
    if len(enough) < MEMBERS:
        return
    ends = tables[enough, least - 1]  # who shares this block as a rule shares all before it
    blocks, counts = np.unique(ends, return_counts=True)
    for block in blocks[counts >= MEMBERS]:
        left = enough[ends == block]
        while len(left) >= MEMBERS:
            same = np.logical_and.accumulate(tables[left] == tables[left[0]], axis=1).sum(axis=1)
            common = np.minimum(np.minimum(same, whole[left]), whole[left[0]])
            order = np.argsort(-common, kind="stable")
            tokens = common[order] * block_size
            saved = tokens * np.arange(len(left))
            best = MEMBERS - 1 + int(np.argmax(saved[MEMBERS - 1 :]))
            if tokens[best] >= TOKENS:
                yield np.sort(left[order[: best + 1]]), int(tokens[best])
            left = np.sort(left[order[best + 1 :]])
