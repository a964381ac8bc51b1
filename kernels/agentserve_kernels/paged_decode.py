"""Attention of single query tokens over the paged cache, each over keys of its own.

Each task takes one sequence and a run of its tokens with all KV heads (split-KV, as in
Flash-Decoding), with a running maximum (online softmax, arXiv 1805.02867); a second pass joins the
runs. The tokens of a block are taken in the order in which they lie in memory, and while one page
is computed with, the lines of the next are asked for.
"""

from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit

from agentserve_kernels.paging import find
from agentserve_kernels.registers import COLUMNS, WIDTH
from agentserve_kernels.scalar import FAST, power, widen
from agentserve_kernels.softmax import query_scale, softmax_row
from agentserve_kernels.tensors import Workspace
from agentserve_kernels.tiles import after, at, dot_tile, fetch, outer_tile

SPAN = 64  # tokens of a piece at most
TOKENS = 3  # of a tile of scores, with up to three query heads
LANES = 4 * WIDTH  # of a tile of values


@njit(nogil=True, cache=True)
def _scores(keys: Any, ahead: Any, count: int, queries: Any, shape: Any, out: Any) -> None:
    """Write to out [group, SPAN] the dot products of `count` keys [count, dim] with the queries.

    All are pointers; ahead: to as many elements that are read next; shape: (group, dim).
    """
    group, dim = shape
    for g in range(0, group, 3):
        some, target = (after(queries, g * dim), dim), after(out, g * SPAN)
        for tile in range((count + TOKENS - 1) // TOKENS if count >= TOKENS else 0):
            t = min(tile * TOKENS, count - TOKENS)  # the last tile may repeat tokens
            if g == 0:
                fetch(after(ahead, t * dim), TOKENS * dim)
            key, there = (after(keys, t * dim), dim), (after(target, t), SPAN)
            if group - g >= 3:
                dot_tile(key, some, dim, there, TOKENS, 3)
            elif group - g == 2:
                dot_tile(key, some, dim, there, TOKENS, 2)
            else:
                dot_tile(key, some, dim, there, TOKENS, 1)
        for t in range(count if count < TOKENS else 0):
            for row in range(min(3, group - g)):
                one = (after(queries, (g + row) * dim), dim)
                there = (after(target, row * SPAN + t), SPAN)
                dot_tile((after(keys, t * dim), dim), one, dim, there, 1, 1)


@njit(nogil=True, cache=True)
def _add_values(weights: Any, values: Any, ahead: Any, count: int, shape: Any, out: Any) -> None:
    """Add to out [group, dim] the sums of `count` values, weighted by rows of `weights`.

    All are pointers, as in `_scores`.
    """
    group, dim = shape
    whole, lanes = dim // LANES * LANES, dim // WIDTH * WIDTH
    for g in range(0, group, 3):
        left = (after(weights, g * SPAN), SPAN, 1)
        for i in range(0, whole, LANES):
            if g == 0:
                fetch(after(ahead, i * count), LANES * count)
            right, target = (after(values, i), dim, COLUMNS), (after(out, g * dim + i), dim)
            if group - g >= 3:
                outer_tile(left, right, count, target, True, 3, 4)
            elif group - g == 2:
                outer_tile(left, right, count, target, True, 2, 4)
            else:
                outer_tile(left, right, count, target, True, 1, 4)
        for row in range(g, min(g + 3, group)):
            one = (after(weights, row * SPAN), SPAN, 1)
            for i in range(whole, lanes, WIDTH):
                right, target = (after(values, i), dim, COLUMNS), (after(out, row * dim + i), dim)
                outer_tile(one, right, count, target, True, 1, 1)


@njit(nogil=True, cache=True)
def _add_rest(weights: Any, values: Any, out: Any) -> None:
    """Do what `_add_values` does for the last elements of a head, which fill no register."""
    group, dim = out.shape
    for g in range(group):
        for t in range(values.shape[0]):
            for i in range(dim // WIDTH * WIDTH, dim):
                out[g, i] += weights[g, t] * widen(values[t, i])


@njit(nogil=True, cache=True)
def _attend_piece(flat: Any, places: Any, count: int, queries: Any, running: Any) -> None:
    """Add `count` tokens of one block, SPAN at most, to the running softmax of all heads.

    places: (first key of head 0, from keys to values, from head to head, first key of the next
    piece), in elements of the cache; queries: [heads, dim]; running: (scores, maxima, sums, shrink,
    values), [heads, ...] each.
    """
    start, to_value, step, following = places
    scores, tops, totals, shrink, values = running
    heads, dim = queries.shape
    kv_heads = to_value // step
    group = heads // kv_heads
    for head in range(kv_heads):
        key, row = start + head * step, head * group
        keys, ahead = at(flat, key), at(flat, key + step)
        _scores(keys, ahead, count, at(queries, row * dim), (group, dim), at(scores, row * SPAN))
    _reweigh(scores, count, tops, totals, shrink, values)
    for head in range(kv_heads):
        value, row = start + to_value + head * step, head * group
        ahead = at(flat, value + step if head + 1 < kv_heads else following)
        weights, target = at(scores, row * SPAN), at(values, row * dim)
        _add_values(weights, at(flat, value), ahead, count, (group, dim), target)
        if dim % WIDTH:
            rest = flat[value : value + count * dim].reshape(count, dim)
            _add_rest(scores[row : row + group], rest, values[row : row + group])


@njit(nogil=True, cache=True)
def _reweigh(scores: Any, count: int, tops: Any, totals: Any, shrink: Any, values: Any) -> None:
    """Turn `count` scores a row into weights, and bring what was added before under the maxima."""
    group, dim = values.shape
    padded = (count + WIDTH - 1) // WIDTH * WIDTH
    for g in range(group):
        for k in range(count, padded):
            scores[g, k] = np.float32(-1e30)
        row = at(scores, g * SPAN)
        softmax_row(row, padded, at(tops, g), at(totals, g), at(shrink, g))
        if shrink[g] != np.float32(1):
            for i in range(dim):
                values[g, i] *= shrink[g]


@njit(fastmath=FAST, nogil=True, cache=True)
def join_runs(partial: Any, decode: Any, out: Any) -> None:
    """Write to each row of `out` what its runs, and its prefix, come to together."""
    maxima, sums, accumulated = partial
    rows, _, _, shared = decode
    _, runs, kv_heads, group, dim = accumulated.shape
    for n in range(rows.size):
        splits = runs if shared[n] else runs - 1
        for h in range(kv_heads * group):
            head, g = h // group, h % group
            top = maxima[n, 0, head, g]
            for s in range(1, splits):
                top = max(top, maxima[n, s, head, g])
            total = np.float32(0)
            out[rows[n], h, :] = np.float32(0)
            for s in range(splits):
                weight = power(maxima[n, s, head, g] - top)
                total += weight * sums[n, s, head, g]
                for i in range(dim):
                    out[rows[n], h, i] += weight * accumulated[n, s, head, g, i]
            for i in range(dim):
                out[rows[n], h, i] /= total


@njit(nogil=True, cache=True)
def attend_run(query: Any, pages: Any, decode: Any, partial: Any, task: int) -> None:
    """Attend from one decode row of query [T, heads, D] to one of its runs of tokens.

    pages: (cache, layer, tables); decode: (rows, slots, lengths, tokens at the start that are left
    out); partial: as `decode_scratch` gives it; task: n * runs + run.
    """
    cache, layer, tables = pages
    lines, slots, lengths, shared = decode
    _, runs, kv_heads, group = partial[0].shape
    splits = runs - 1
    n, split, dim = task // splits, task % splits, query.shape[2]
    queries = np.empty((kv_heads * group, dim), np.float32)
    scale = query_scale(dim)
    for h in range(kv_heads * group):
        for i in range(dim):
            queries[h, i] = query[lines[n], h, i] * scale
    scores = np.empty((kv_heads * group, SPAN), np.float32)
    shrink = np.empty(kv_heads * group, np.float32)
    tops, totals = partial[0][n, split].reshape(-1), partial[1][n, split].reshape(-1)
    values = partial[2][n, split].reshape(-1, dim)
    tops[:], totals[:], values[:] = np.float32(-1e30), np.float32(0), np.float32(0)
    shape, flat, source = cache.shape, cache.reshape(-1), (layer, 0, tables[slots[n]])
    own = lengths[n] - shared[n]
    first, last = shared[n] + own * split // splits, shared[n] + own * (split + 1) // splits
    while first < last:
        start, to_value, left = find(shape, source, first)
        count = min(left, last - first, SPAN)
        first += count
        following = find(shape, source, first)[0] if first < last else start
        places = (start, to_value, shape[4] * dim, following)
        _attend_piece(flat, places, count, queries, (scores, tops, totals, shrink, values))


def decode_scratch(cache: torch.Tensor, heads: int, count: int, workspace: Workspace) -> Any:
    """Return (maxima, sums, values) of each row's runs of tokens, and of its prefix at the end."""
    kv_heads, dim = cache.shape[3], cache.shape[5]
    # Enough tasks that every thread has work for a single sequence.
    splits = -(-4 * get_num_threads() // max(1, count))
    shape = (count, splits + 1, kv_heads, heads // kv_heads)
    return (
        workspace.take("decode.maxima", shape).numpy(),
        workspace.take("decode.sums", shape).numpy(),
        workspace.take("decode.values", (*shape, dim)).numpy(),
    )
