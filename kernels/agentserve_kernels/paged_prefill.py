"""Attention of a chunk of new tokens of one sequence over its paged cache.

A row is one query head of one token; the rows that share a KV head are taken COLUMNS at a time, as
the lanes of the register tiles. Each task takes some of these panels and goes over the keys in
spans, widened once for all its panels, whose scores stay in the core's own cache (FlashAttention,
arXiv 2205.14135): products, online softmax, products. Scores lie as [keys, rows], so that softmax
works on whole registers and nothing is transposed.
"""

from typing import Any

import numpy as np
import torch
from numba import get_num_threads, get_thread_id, njit, prange

from agentserve_kernels.paging import find
from agentserve_kernels.registers import COLUMNS, WIDTH
from agentserve_kernels.scalar import widen
from agentserve_kernels.softmax import shrink_columns, softmax_tile
from agentserve_kernels.tensors import Chunk, Pages, Workspace, check, view
from agentserve_kernels.tiles import at, panel_product, widen_run

PANELS = 6  # of a task
SPAN = 256  # keys at a time: with their values and a panel's scores half of a core's 512 KB


@njit(nogil=True, cache=True)
def _widen_span(cache: Any, source: Any, first: int, count: int, keys: Any, values: Any) -> None:
    """Copy keys and values of the positions first .. first + count - 1 to float32 [count, D]."""
    shape, flat = cache.shape, cache.reshape(-1)
    dim = shape[5]
    done = 0
    while done < count:
        start, to_value, left = find(shape, source, first + done)
        some = min(left, count - done)
        whole = some * dim // WIDTH * WIDTH
        widen_run(at(flat, start), whole, at(keys, done * dim))
        widen_run(at(flat, start + to_value), whole, at(values, done * dim))
        for i in range(whole, some * dim):
            keys[done + i // dim, i % dim] = widen(flat[start + i])
            values[done + i // dim, i % dim] = widen(flat[start + to_value + i])
        done += some


@njit(nogil=True, cache=True)
def _attend_panel(queries: Any, span: Any, running: Any, shape: Any, scratch: Any) -> None:
    """Add a span of keys to the attention of COLUMNS rows. All are pointers.

    queries: [D, COLUMNS]; span: (keys, values, hidden), [tokens, D] and what `_hide` takes;
    running: (maxima, sums, accumulated), [COLUMNS] and [D, COLUMNS]; shape: (tokens, D).
    """
    keys, values, visible = span
    maxima, sums, accumulated = running
    scores, shrink = scratch
    count, dim = shape
    panel = (queries, COLUMNS, 0)
    panel_product(count, (keys, dim, 1), panel, dim, (at(scores, 0), COLUMNS), False)
    _hide(scores, count, visible)
    softmax_tile(at(scores, 0), count, maxima, sums, at(shrink, 0))
    shrink_columns(dim, accumulated, at(shrink, 0))
    weights, target = (at(scores, 0), COLUMNS, 0), (accumulated, COLUMNS)
    panel_product(dim, (values, 1, dim), weights, count, target, True)


@njit(nogil=True, cache=True)
def _hide(scores: Any, count: int, visible: Any) -> None:
    """Put the scores of keys that a row must not see out of reach.

    visible: (the first row's number, rows a token, how many of the keys token 0 sees).
    """
    row, group, seen = visible
    if seen + row // group < count:
        for lane in range(COLUMNS):
            for k in range(max(0, seen + (row + lane) // group), count):
                scores[k, lane] = np.float32(-1e30)


@njit(nogil=True, cache=True)
def _load_queries(query: Any, rows: Any, group: int, head: int, panels: Any) -> None:
    """Write the rows' scaled queries to panels [panels, D, COLUMNS]; spare lanes are zero."""
    first, end = rows
    dim = query.shape[2]
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for r in range(first, first + panels.shape[0] * COLUMNS):
        panel, lane = (r - first) // COLUMNS, (r - first) % COLUMNS
        for i in range(dim):
            if r < end:
                panels[panel, i, lane] = query[r // group, head * group + r % group, i] * scale
            else:
                panels[panel, i, lane] = np.float32(0)


@njit(nogil=True, cache=True)
def _store(rows: Any, group: int, head: int, running: Any, out: Any) -> None:
    first, end = rows
    _, sums, accumulated = running
    for r in range(first, end):
        panel, lane = (r - first) // COLUMNS, (r - first) % COLUMNS
        inverse = np.float32(1) / sums[panel, lane]
        for i in range(accumulated.shape[1]):
            value = accumulated[panel, i, lane] * inverse
            out[r // group, head * group + r % group, i] = value


@njit(nogil=True, cache=True)
def _attend_panels(query: Any, start: int, pages: Any, source: Any, some: Any, work: Any) -> None:
    """Attend from the rows of the panels some[0] .. some[1] - 1 with one KV head."""
    cache, out = pages
    keys, values, queries, scores, shrink, maxima, sums, sofar = work
    count, dim, group = query.shape[0], query.shape[2], query.shape[1] // cache.shape[3]
    rows = (some[0] * COLUMNS, min(some[1] * COLUMNS, count * group))
    panels = queries[: some[1] - some[0]]
    maxima[:], sums[:], sofar[:] = np.float32(-1e30), np.float32(0), np.float32(0)
    _load_queries(query, rows, group, source[1], panels)
    length = start + (rows[1] - 1) // group + 1
    for first in range(0, length, SPAN):
        size = min(SPAN, length - first)
        _widen_span(cache, source, first, size, keys, values)
        for panel in range(panels.shape[0]):
            visible = (rows[0] + panel * COLUMNS, group, start + 1 - first)
            row, place = panel * COLUMNS, panel * COLUMNS * dim
            running = (at(maxima, row), at(sums, row), at(sofar, place))
            span = (at(keys, 0), at(values, 0), visible)
            _attend_panel(at(panels, place), span, running, (size, dim), (scores, shrink))
    _store(rows, group, source[1], (maxima, sums, sofar), out)


@njit(parallel=True, nogil=True, cache=True)
def attend_chunk(query: Any, start: int, pages: Any, table: Any, scratch: Any, out: Any) -> None:
    """Attend from the tokens of query [count, heads, D], at positions start.., to the cache.

    pages: (cache, layer); scratch: as `prefill_scratch` gives it.
    """
    cache, layer = pages
    kv_heads = cache.shape[3]
    panels = (query.shape[0] * (query.shape[1] // kv_heads) + COLUMNS - 1) // COLUMNS
    tiles = (panels + PANELS - 1) // PANELS
    keys, values, queries, scores, shrink, maxima, sums, sofar = scratch
    for task in prange(kv_heads * tiles):
        head, tile = task % kv_heads, task // kv_heads
        some = (panels * tile // tiles, panels * (tile + 1) // tiles)
        n = get_thread_id()
        work = (keys[n], values[n], queries[n], scores[n], shrink[n], maxima[n], sums[n], sofar[n])
        _attend_panels(query, start, (cache, out), (layer, head, table), some, work)


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
    pages.check(heads, dim)
    here = slice(chunk.row, chunk.row + chunk.count)
    attend_chunk(
        query.numpy()[here],
        chunk.start,
        (view(pages.cache), pages.layer),
        pages.tables.numpy()[chunk.slot],
        prefill_scratch(dim, workspace),
        out.numpy()[here],
    )


def prefill_scratch(dim: int, workspace: Workspace) -> Any:
    """Return what each thread of `attend_chunk` works on."""
    shapes = {
        "keys": (SPAN, dim),
        "widened": (SPAN, dim),
        "queries": (PANELS, dim, COLUMNS),
        "scores": (SPAN, COLUMNS),
        "shrink": (COLUMNS,),
        "maxima": (PANELS, COLUMNS),
        "sums": (PANELS, COLUMNS),
        "values": (PANELS, dim, COLUMNS),
    }
    return tuple(
        workspace.take(f"prefill.{name}", (get_num_threads(), *rest)).numpy()
        for name, rest in shapes.items()
    )
