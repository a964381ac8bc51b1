"""Attention of single query tokens over the paged cache: one pass, read through the block table.

Each task takes one sequence, one KV head and a run of blocks (split-KV, as in Flash-Decoding), with
a running maximum (online softmax, arXiv 1805.02867); a second pass joins the runs.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from agentserve_kernels.scalar import FAST, exp32, widen
from agentserve_kernels.tensors import DecodeRows, Pages, Workspace, check, view


@functools.cache
def _partial_kernel(group: int, dim: int) -> Any:
    """Compile for one head shape: constant bounds let LLVM unroll the inner loops.

    One function, because numba's cache takes closures over numbers, not over other kernels.
    """

    @njit(parallel=True, fastmath=FAST, nogil=True, cache=True)
    def partial(query: Any, pages: Any, decode: Any, running: Any) -> None:
        cache, layer, tables = pages
        rows, slots, lengths = decode
        maxima, sums, accumulated = running
        kv_heads, block_size = cache.shape[3], cache.shape[4]
        splits = maxima.shape[2]
        scale = np.float32(1) / np.sqrt(np.float32(dim))
        for task in prange(rows.size * kv_heads * splits):
            n, rest = task // (kv_heads * splits), task % (kv_heads * splits)
            head, split = rest // splits, rest % splits
            blocks = (lengths[n] + block_size - 1) // block_size
            scaled = query[rows[n], head * group : (head + 1) * group] * scale
            scores = np.empty((group, block_size), np.float32)
            top, total = maxima[n, head, split], sums[n, head, split]
            values = accumulated[n, head, split]
            top[:] = np.float32(-1e30)
            total[:] = np.float32(0)
            values[:] = np.float32(0)
            for b in range(blocks * split // splits, blocks * (split + 1) // splits):
                record = cache[np.int64(tables[slots[n], b]), layer]
                count = min(block_size, lengths[n] - b * block_size)
                for t in range(count):
                    for g in range(group):
                        dot = np.float32(0)
                        for i in range(dim):
                            dot += scaled[g, i] * widen(record[0, head, t, i])
                        scores[g, t] = dot
                _rescale(scores, count, top, total, values)
                for t in range(count):
                    for g in range(group):
                        weight = scores[g, t]
                        for i in range(dim):
                            values[g, i] += weight * widen(record[1, head, t, i])

    return partial


@njit(fastmath=FAST, nogil=True, cache=True)
def _rescale(scores: Any, count: int, maxima: Any, sums: Any, values: Any) -> None:
    """Turn scores into weights under the new maximum, and bring the running sums under it."""
    for g in range(maxima.size):
        top = maxima[g]
        for t in range(count):
            top = max(top, scores[g, t])
        shrink = exp32(maxima[g] - top)
        maxima[g] = top
        total = np.float32(0)
        for t in range(count):
            scores[g, t] = exp32(scores[g, t] - top)
            total += scores[g, t]
        sums[g] = sums[g] * shrink + total
        for i in range(values.shape[1]):
            values[g, i] *= shrink


@njit(fastmath=FAST, nogil=True, cache=True)
def _join(partial: Any, rows: Any, out: Any) -> None:
    maxima, sums, accumulated = partial
    _, kv_heads, splits, group, dim = accumulated.shape
    for n in range(rows.size):
        for h in range(kv_heads * group):
            head, g = h // group, h % group
            top = maxima[n, head, :, g].max()
            total = np.float32(0)
            out[rows[n], h, :] = np.float32(0)
            for s in range(splits):
                weight = exp32(maxima[n, head, s, g] - top)
                total += weight * sums[n, head, s, g]
                for i in range(dim):
                    out[rows[n], h, i] += weight * accumulated[n, head, s, g, i]
            for i in range(dim):
                out[rows[n], h, i] /= total


def paged_decode(
    query: torch.Tensor,
    pages: Pages,
    decode: DecodeRows,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Write the attention outputs of the decode rows to their rows of `out`.

    query, out: [T, heads, D] float32. The tokens' own keys and values are in the cache already.
    Raises ValueError for other shapes or dtypes.
    """
    _, heads, dim = query.shape
    count = decode.rows.shape[0]
    check("query", query, (query.shape[0], heads, dim), torch.float32)
    check("out", out, tuple(query.shape), torch.float32)
    pages.check(dim)
    for name, tensor in vars(decode).items():
        check(name, tensor, (count,), torch.int64)
    if count:
        attend = decode_attention(pages.cache, heads, decode, workspace)
        attend(query.numpy(), pages.layer, pages.tables.numpy(), out.numpy())


def decode_attention(
    cache: torch.Tensor, heads: int, decode: DecodeRows, workspace: Workspace
) -> Callable[[Any, int, Any, Any], None]:
    """Return attend(query, layer, tables, out) on arrays, to be called for every layer of a step.

    What does not depend on the layer is prepared here once. The arrays are not checked.
    """
    count, kv_heads, dim = decode.rows.shape[0], cache.shape[3], cache.shape[5]
    # Enough tasks that every thread has work for a single sequence with one KV head.
    splits = max(1, -(-4 * get_num_threads() // (count * kv_heads)))
    shape = (count, kv_heads, splits, heads // kv_heads)
    running = (
        workspace.take("decode.maxima", shape).numpy(),
        workspace.take("decode.sums", shape).numpy(),
        workspace.take("decode.values", (*shape, dim)).numpy(),
    )
    rows = decode.rows.numpy()
    lists = (rows, decode.slots.numpy(), decode.lengths.numpy())
    blocks = view(cache)
    partial = _partial_kernel(heads // kv_heads, dim)

    def attend(query: Any, layer: int, tables: Any, out: Any) -> None:
        partial(query, (blocks, layer, tables), lists, running)
        _join(running, rows, out)

    return attend
