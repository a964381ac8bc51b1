"""Attention of a chunk of new tokens of one sequence over its paged cache.

Keys and values are widened once into panels that fit the register tiles. Then each task takes some
of the chunk's tokens with one KV head, and goes over the keys in spans whose scores stay in the
core's own cache (FlashAttention, arXiv 2205.14135): products, online softmax, products.
"""

from typing import Any

import numpy as np
import torch
from numba import get_num_threads, get_thread_id, njit, prange

from agentserve_kernels.scalar import FAST, exp32, largest, widen
from agentserve_kernels.tensors import Chunk, Pages, Workspace, check, view
from agentserve_kernels.tiles import COLUMNS, ROWS, VECTORS, at, outer_tile

SCORE_ROWS = 96  # of a task: tokens times the heads that share a KV head
SPAN = 512  # keys at a time, a multiple of COLUMNS: their scores are 192 KB


@njit(parallel=True, nogil=True, cache=True)
def _gather(cache: Any, layer: int, table: Any, length: int, panels: Any) -> None:
    """Widen to keys [kv_heads, panels, D, COLUMNS] and values [kv_heads, tokens, width].

    The last panel's spare columns repeat its last token, which no row sees.
    """
    keys, values = panels
    layers, _, kv_heads, block_size, dim = cache.shape[1:]
    count, size, flat = keys.shape[1], block_size * dim, cache.reshape(-1)
    for task in prange(kv_heads * count):
        head, panel = task // count, task % count
        for column in range(COLUMNS):
            token = panel * COLUMNS + column
            seen = min(token, length - 1)
            record = np.int64(table[seen // block_size]) * layers + layer
            start = (2 * record * kv_heads + head) * size + seen % block_size * dim
            # Slices: LLVM vectorises only what cannot overlap and needs no index of its own.
            key, value = flat[start : start + dim], flat[start + kv_heads * size :][:dim]
            wide = values[head, token]
            for i in range(dim):
                keys[head, panel, i, column] = widen(key[i])
            for i in range(dim):
                wide[i] = widen(value[i])
            wide[dim:] = np.float32(0)


@njit(fastmath=FAST, nogil=True, cache=True)
def _online_softmax(scores: Any, keys: int, seen: int, group: int, running: Any) -> None:
    """Turn scores into weights under the new maxima, and bring the running sums under them.

    Rows 0..group-1 see the first `seen` of the span's `keys`, the next rows one more, and so on.
    """
    maxima, sums, accumulated = running
    for r in range(maxima.size):
        row = scores[r]
        count = max(0, min(keys, seen + r // group))
        top = max(maxima[r], largest(row[:count]))
        shrink = exp32(maxima[r] - top)
        maxima[r] = top
        total = np.float32(0)
        for i in range(count):
            weight = exp32(row[i] - top)
            row[i] = weight
            total += weight
        row[count:keys] = np.float32(0)
        sums[r] = sums[r] * shrink + total
        if shrink != np.float32(1):
            for i in range(accumulated.shape[1]):
                accumulated[r, i] *= shrink


@njit(nogil=True, cache=True)
def _attend_rows(rows: Any, panels: Any, visible: Any, scratch: Any) -> None:
    """Accumulate softmax(rows @ keys.T) @ values over all spans; `rows` is a multiple of ROWS.

    visible: (keys that the first row sees, rows a token, keys that the last row sees).
    """
    keys, values = panels
    scores, running = scratch
    seen, group, end = visible
    count, dim = rows.shape
    width = values.shape[1]
    accumulated = running[2]
    for first in range(0, end, SPAN):
        span = min(SPAN, (end - first + COLUMNS - 1) // COLUMNS * COLUMNS)
        for column in range(0, span, COLUMNS):
            panel = (at(keys, (first + column) * dim), COLUMNS)
            for r in range(0, count, ROWS):
                target = (at(scores, r * SPAN + column), SPAN)
                left = (at(rows, r * dim), dim)
                outer_tile(left, panel, dim, target, False, ROWS, VECTORS)
        _online_softmax(scores, span, seen - first, group, running)
        for column in range(0, width, COLUMNS):
            right = (at(values, first * width + column), width)
            for r in range(0, count, ROWS):
                target = (at(accumulated, r * width + column), width)
                left = (at(scores, r * SPAN), SPAN)
                outer_tile(left, right, span, target, True, ROWS, VECTORS)


@njit(parallel=True, nogil=True, cache=True)
def _attend(query: Any, start: int, panels: Any, scratch: Any, out: Any) -> None:
    """Attend from the tokens of query [count, heads, D], at positions start.., to the panels."""
    keys, values = panels
    count, heads, dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    tiles = (count * group + SCORE_ROWS - 1) // SCORE_ROWS
    for task in prange(kv_heads * tiles):
        head, tile = task % kv_heads, task // kv_heads
        first, end = count * tile // tiles, count * (tile + 1) // tiles
        used = (end - first) * group
        size = (used + ROWS - 1) // ROWS * ROWS
        worker = get_thread_id()
        rows, scores, maxima, sums, accumulated = (
            scratch[0][worker, :size],
            scratch[1][worker],
            scratch[2][worker, :size],
            scratch[3][worker, :size],
            scratch[4][worker, :size],
        )
        for r in range(size):
            token = first + min(r, used - 1) // group  # the last rows only fill a tile
            for i in range(dim):
                rows[r, i] = query[token, head * group + r % group, i] * scale
        maxima[:] = np.float32(-1e30)
        sums[:] = np.float32(0)
        accumulated[:] = np.float32(0)
        visible = (start + first + 1, group, start + end)
        running = (maxima, sums, accumulated)
        _attend_rows(rows, (keys[head], values[head]), visible, (scores, running))
        for r in range(used):
            inverse = np.float32(1) / sums[r]
            for i in range(dim):
                out[first + r // group, head * group + r % group, i] = accumulated[r, i] * inverse


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
    check("query", query, (query.shape[0], heads, dim), torch.float32)
    check("out", out, tuple(query.shape), torch.float32)
    pages.check(dim)
    prefill_attention(pages.cache, heads, chunk, workspace)(
        query.numpy(), pages.layer, pages.tables.numpy(), out.numpy()
    )


def prefill_attention(cache: torch.Tensor, heads: int, chunk: Chunk, workspace: Workspace) -> Any:
    """Return attend(query, layer, tables, out) on arrays, to be called for every layer of a step.

    What does not depend on the layer is prepared here once. The arrays are not checked.
    """
    kv_heads, dim = cache.shape[3], cache.shape[5]
    length = chunk.start + chunk.count
    count = -(-length // COLUMNS)
    width = -(-dim // COLUMNS) * COLUMNS
    panels = (
        workspace.take("prefill.keys", (kv_heads, count, dim, COLUMNS)).numpy(),
        workspace.take("prefill.widened", (kv_heads, count * COLUMNS, width)).numpy(),
    )
    threads, rows = get_num_threads(), -(-(SCORE_ROWS + heads // kv_heads) // ROWS) * ROWS
    shapes = {"rows": (dim,), "scores": (SPAN,), "maxima": (), "sums": (), "values": (width,)}
    scratch = tuple(
        workspace.take(f"prefill.{name}", (threads, rows, *rest)).numpy()
        for name, rest in shapes.items()
    )
    blocks, here = view(cache), slice(chunk.row, chunk.row + chunk.count)

    def attend(query: Any, layer: int, tables: Any, out: Any) -> None:
        _gather(blocks, layer, tables[chunk.slot], length, panels)
        _attend(query[here], chunk.start, panels, scratch, out[here])

    return attend
