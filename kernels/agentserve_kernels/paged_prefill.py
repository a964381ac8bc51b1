"""Attention of many tokens over the same keys of the paged cache, as a matrix product.

A row is one query head of one token; the rows that share a KV head are taken COLUMNS at a time, as
the lanes of the register tiles. Each task takes some of these panels and goes over the keys in
spans, widened once for all its panels, whose scores stay in the core's own cache (FlashAttention,
arXiv 2205.14135): products, online softmax, products. Scores lie as [keys, rows], so that softmax
works on whole registers and nothing is transposed.
"""

from typing import Any

import numpy as np
from numba import get_num_threads, njit

from agentserve_kernels.paging import find
from agentserve_kernels.registers import COLUMNS, WIDTH
from agentserve_kernels.scalar import widen
from agentserve_kernels.softmax import query_scale, shrink_columns, softmax_tile
from agentserve_kernels.tensors import Workspace
from agentserve_kernels.tiles import at, panel_product, widen_run

# A task's queries and sums, a span of keys with their values and a panel's scores take 320 KB of a
# core's 512 with heads of 64 elements. The more rows share a span, the less often it is widened.
PANELS = 192 // COLUMNS
SPAN = 384


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
def count_tiles(tokens: int, group: int, least: int) -> int:
    """Return how many tasks a KV head has for so many tokens, each with `group` query heads.

    least: how many there are at least, while each has a panel.
    """
    panels = (tokens * group + COLUMNS - 1) // COLUMNS
    return max(min(panels, least), (panels + PANELS - 1) // PANELS)


@njit(nogil=True, cache=True)
def _load_queries(query: Any, lines: Any, rows: Any, head: Any, panels: Any) -> None:
    """Write the rows' scaled queries to panels [panels, D, COLUMNS]; spare lanes are zero."""
    first, end = rows
    number, group = head
    dim = query.shape[2]
    scale = query_scale(dim)
    for r in range(first, first + panels.shape[0] * COLUMNS):
        panel, lane = (r - first) // COLUMNS, (r - first) % COLUMNS
        if r < end:
            line, own = lines[r // group], number * group + r % group
            for i in range(dim):
                panels[panel, i, lane] = query[line, own, i] * scale
        else:
            for i in range(dim):
                panels[panel, i, lane] = np.float32(0)


@njit(nogil=True, cache=True)
def attend_panels(query: Any, tokens: Any, cache: Any, source: Any, tile: Any, work: Any) -> Any:
    """Attend with one KV head from the rows of tile (number, tiles); return (first, end).

    tokens: (lines, seen, more): token i is lines[i] of query [T, heads, D] and attends to the first
    seen + i * more keys; source: (layer, KV head, table); work: one thread's `panel_scratch`. Row r
    is head r % group of token r // group; what it gathered is left in the last three of `work`, at
    [panel, lane].
    """
    lines, seen, more = tokens
    keys, values, queries, scores, shrink, maxima, sums, sofar = work
    dim, group = query.shape[2], query.shape[1] // cache.shape[3]
    number, tiles = tile
    count = (lines.size * group + COLUMNS - 1) // COLUMNS
    some = (count * number // tiles, count * (number + 1) // tiles)
    rows = (some[0] * COLUMNS, min(some[1] * COLUMNS, lines.size * group))
    panels = queries[: some[1] - some[0]]
    maxima[:], sums[:], sofar[:] = np.float32(-1e30), np.float32(0), np.float32(0)
    _load_queries(query, lines, rows, (source[1], group), panels)
    length = seen + (rows[1] - 1) // group * more
    for first in range(0, length, SPAN):
        size = min(SPAN, length - first)
        _widen_span(cache, source, first, size, keys, values)
        for panel in range(panels.shape[0]):
            row, place = panel * COLUMNS, panel * COLUMNS * dim
            last = min(rows[0] + row + COLUMNS, rows[1]) - 1
            own = min(size, seen + last // group * more - first)
            visible = (rows[0] + row, group, (seen - first) if more else size)
            running = (at(maxima, row), at(sums, row), at(sofar, place))
            span = (at(keys, 0), at(values, 0), visible)
            if own > 0:
                shape = (own, dim)
                _attend_panel(at(panels, place), span, running, shape, (scores, shrink))
    return rows


def panel_scratch(dim: int, workspace: Workspace) -> Any:
    """Return what each thread of `attend_panels` works on."""
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
    threads = get_num_threads()
    return tuple(
        workspace.take(f"panels.{name}", (threads, *rest)).numpy() for name, rest in shapes.items()
    )
