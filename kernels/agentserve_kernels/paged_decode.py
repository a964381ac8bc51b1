"""Attention of single query tokens over the paged cache: one pass, read through the block table.

Each task takes one sequence, one KV head and a run of blocks (split-KV, as in Flash-Decoding), with
a running maximum (online softmax, arXiv 1805.02867); a second pass joins the runs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from agentserve_kernels.scalar import FAST, exp32, largest, widen
from agentserve_kernels.tensors import DecodeRows, Pages, Workspace, check, view
from agentserve_kernels.tiles import WIDTH, at, dot_tile, outer_tile

SPAN_BLOCKS = 4  # blocks between two looks at the maximum
TOKENS = 4  # of a tile of scores, with up to three query heads
LANES = 4 * WIDTH  # of a tile of values


@njit(nogil=True, cache=True)
def _scores(cache: Any, keys: int, queries: Any, count: int, out: Any, column: int) -> None:
    """Write to columns column.. of `out` the dot products of `count` keys with all `queries`.

    keys: where in the flat cache the first one lies; queries: [group, dim]; out: [group, span].
    """
    group, dim = queries.shape
    span = out.shape[1]
    for g in range(0, group, 3):
        some = (at(queries, g * dim), dim)
        for t in range(0, count - TOKENS + 1, TOKENS):
            key = (at(cache, keys + t * dim), dim)
            target = (at(out, g * span + column + t), span)
            if group - g >= 3:
                dot_tile(key, some, dim, target, TOKENS, 3)
            elif group - g == 2:
                dot_tile(key, some, dim, target, TOKENS, 2)
            else:
                dot_tile(key, some, dim, target, TOKENS, 1)
        for t in range(count - count % TOKENS, count):
            key = (at(cache, keys + t * dim), dim)
            for row in range(g, min(g + 3, group)):
                target = (at(out, row * span + column + t), span)
                dot_tile(key, (at(queries, row * dim), dim), dim, target, 1, 1)


@njit(nogil=True, cache=True)
def _add_values(scores: Any, column: int, cache: Any, values: int, count: int, out: Any) -> None:
    """Add to out [group, dim] the sums of `count` values, weighted by columns column.. of `scores`.

    values: where in the flat cache the first one lies.
    """
    group, dim = out.shape
    span = scores.shape[1]
    whole, lanes = dim // LANES * LANES, dim // WIDTH * WIDTH
    for g in range(0, group, 3):
        left = (at(scores, g * span + column), span)
        for i in range(0, whole, LANES):
            right, target = (at(cache, values + i), dim), (at(out, g * dim + i), dim)
            if group - g >= 3:
                outer_tile(left, right, count, target, True, 3, 4)
            elif group - g == 2:
                outer_tile(left, right, count, target, True, 2, 4)
            else:
                outer_tile(left, right, count, target, True, 1, 4)
        for row in range(g, min(g + 3, group)):
            one = (at(scores, row * span + column), span)
            for i in range(whole, lanes, WIDTH):
                right, target = (at(cache, values + i), dim), (at(out, row * dim + i), dim)
                outer_tile(one, right, count, target, True, 1, 1)


@njit(parallel=True, fastmath=FAST, nogil=True, cache=True)
def _partial(query: Any, pages: Any, decode: Any, running: Any) -> None:
    cache, layer, tables = pages
    lines, slots, lengths = decode
    layers, _, kv_heads, block_size, dim = cache.shape[1:]
    _, _, splits, group = running[0].shape
    span, size = SPAN_BLOCKS * block_size, block_size * dim
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for task in prange(lines.size * kv_heads * splits):
        n, rest = task // (kv_heads * splits), task % (kv_heads * splits)
        head, split = rest // splits, rest % splits
        table, length = tables[slots[n]], lengths[n]
        blocks = (length + block_size - 1) // block_size
        queries = query[lines[n], head * group : (head + 1) * group] * scale
        scores = np.empty((group, span), np.float32)
        top, total = running[0][n, head, split], running[1][n, head, split]
        values = running[2][n, head, split]
        top[:], total[:], values[:] = np.float32(-1e30), np.float32(0), np.float32(0)
        end = blocks * (split + 1) // splits
        for first in range(blocks * split // splits, end, SPAN_BLOCKS):
            count = min(SPAN_BLOCKS * block_size, length - first * block_size)
            count = min(count, (end - first) * block_size)
            for t in range(0, count, block_size):
                record = np.int64(table[first + t // block_size]) * layers + layer
                keys = (2 * record * kv_heads + head) * size
                _scores(cache, keys, queries, min(block_size, count - t), scores, t)
            _rescale(scores, count, top, total, values)
            for t in range(0, count, block_size):
                block = np.int64(table[first + t // block_size])
                record = block * layers + layer
                first_value = ((2 * record + 1) * kv_heads + head) * size
                some = min(block_size, count - t)
                _add_values(scores, t, cache, first_value, some, values)
                if dim % WIDTH:
                    _add_rest(scores[:, t:], cache[block, layer, 1, head], some, values)


@njit(fastmath=FAST, nogil=True, cache=True)
def _add_rest(scores: Any, values: Any, tokens: int, out: Any) -> None:
    """Do what `_add_values` does for the last elements of a head, which fill no register."""
    group, dim = out.shape
    for g in range(group):
        for t in range(tokens):
            for i in range(dim // WIDTH * WIDTH, dim):
                out[g, i] += scores[g, t] * widen(values[t, i])


@njit(fastmath=FAST, nogil=True, cache=True)
def _rescale(scores: Any, count: int, maxima: Any, sums: Any, values: Any) -> None:
    """Turn scores into weights under the new maximum, and bring the running sums under it."""
    for g in range(maxima.size):
        row = scores[g]
        top = max(maxima[g], largest(row[:count]))
        shrink = exp32(maxima[g] - top)
        maxima[g] = top
        total = np.float32(0)
        for t in range(count):
            row[t] = exp32(row[t] - top)
            total += row[t]
        sums[g] = sums[g] * shrink + total
        if shrink != np.float32(1):
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

    def attend(query: Any, layer: int, tables: Any, out: Any) -> None:
        _partial(query, (blocks, layer, tables), lists, running)
        _join(running, rows, out)

    return attend
