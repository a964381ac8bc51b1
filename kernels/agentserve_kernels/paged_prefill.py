"""Attention of a chunk of new tokens of one sequence over its paged cache.

Keys and values are gathered (and widened) into reused buffers, then two batched GEMMs with a fused
causal softmax between them, tile by tile of queries so that the scores stay in the cache.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from agentserve_kernels.scalar import FAST, exp32, widen
from agentserve_kernels.tensors import Chunk, Pages, Workspace, check, view

SCORE_BUDGET = 2 * 1024 * 1024  # float32 scores of one tile of queries, all heads


@njit(parallel=True, nogil=True, cache=True)
def _gather(cache: Any, layer: int, table: Any, length: int, out: Any) -> None:
    kv_heads, block_size, dim = cache.shape[3], cache.shape[4], cache.shape[5]
    for b in prange((length + block_size - 1) // block_size):
        block = np.int64(table[b])
        first = b * block_size
        for part in range(2):
            for head in range(kv_heads):
                for t in range(min(block_size, length - first)):
                    for i in range(dim):
                        out[part, head, first + t, i] = widen(cache[block, layer, part, head, t, i])


@njit(fastmath=True, nogil=True, cache=True)
def _largest(row: Any) -> Any:
    # Only a maximum that may ignore NaN is vectorised; exp32 finds the NaN again.
    top = np.float32(-1e30)
    for i in range(row.size):
        top = max(top, row[i])
    return top


@njit(parallel=True, fastmath=FAST, nogil=True, cache=True)
def _causal_softmax(scores: Any, start: int, scale: Any) -> None:
    """Turn scores [kv_heads, count, group, end] into weights; token c sees start + c + 1 keys."""
    kv_heads, count, group, end = scores.shape
    for task in prange(kv_heads * count):
        head, token = task // count, task % count
        seen = start + token + 1
        for g in range(group):
            row = scores[head, token, g]
            top = _largest(row[:seen])
            total = np.float32(0)
            for i in range(seen):
                row[i] = exp32((row[i] - top) * scale)
                total += row[i]
            inverse = np.float32(1) / total
            for i in range(seen):
                row[i] *= inverse
            for i in range(seen, end):
                row[i] = np.float32(0)


def paged_prefill(
    query: torch.Tensor,
    pages: Pages,
    chunk: Chunk,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Write the attention outputs of the chunk to its rows of `out`.

    query, out: [T, heads, D] float32. The chunk's keys and values are in the cache already. Raises
    ValueError for other shapes or dtypes.
    """
    _, heads, dim = query.shape
    kv_heads = pages.cache.shape[3]
    check("query", query, (query.shape[0], heads, dim), torch.float32)
    check("out", out, tuple(query.shape), torch.float32)
    pages.check(dim)
    length = chunk.start + chunk.count
    gathered = workspace.take("prefill.kv", (2, kv_heads, length, dim))
    table = pages.tables[chunk.slot].numpy()
    _gather(view(pages.cache), pages.layer, table, length, gathered.numpy())
    tile = max(1, SCORE_BUDGET // (heads * length))
    for first in range(0, chunk.count, tile):
        part = Chunk(
            chunk.slot, chunk.row + first, chunk.start + first, min(tile, chunk.count - first)
        )
        _attend_tile(query, gathered, part, out, workspace)


def _attend_tile(
    query: torch.Tensor,
    gathered: torch.Tensor,
    chunk: Chunk,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    _, heads, dim = query.shape
    kv_heads, end = gathered.shape[1], chunk.start + chunk.count
    group = heads // kv_heads
    keys, values = gathered[:, :, :end]
    rows = slice(chunk.row, chunk.row + chunk.count)
    grouped = (kv_heads, chunk.count, group, dim)
    flat = (kv_heads, chunk.count * group, dim)
    queries = workspace.take("prefill.query", grouped)
    queries.copy_(query[rows].view(chunk.count, kv_heads, group, dim).transpose(0, 1))
    scores = workspace.take("prefill.scores", (kv_heads, chunk.count * group, end))
    torch.bmm(queries.view(flat), keys.transpose(1, 2), out=scores)
    by_token = scores.view(kv_heads, chunk.count, group, end)
    _causal_softmax(by_token.numpy(), chunk.start, np.float32(dim**-0.5))
    attended = workspace.take("prefill.out", flat)
    torch.bmm(scores, values, out=attended)
    out[rows].view(chunk.count, kv_heads, group, dim).copy_(attended.view(grouped).transpose(0, 1))
