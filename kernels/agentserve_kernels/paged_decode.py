"""Attention of single query tokens over the paged cache: one pass, read through the block table.

Each task takes one sequence and a run of its tokens with all KV heads (split-KV, as in
Flash-Decoding), with a running maximum (online softmax, arXiv 1805.02867); a second pass joins the
runs.
"""

from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from agentserve_kernels.paging import find
from agentserve_kernels.registers import COLUMNS, WIDTH
from agentserve_kernels.scalar import FAST, exp32, widen
from agentserve_kernels.softmax import softmax_row
from agentserve_kernels.tensors import DecodeRows, Pages, Workspace, check, view
from agentserve_kernels.tiles import after, at, dot_tile, outer_tile

SPAN = 64  # tokens between two looks at the maximum
TOKENS = 3  # of a tile of scores, with up to three query heads
LANES = 4 * WIDTH  # of a tile of values


@njit(nogil=True, cache=True)
def _scores(keys: Any, count: int, queries: Any, shape: Any, out: Any) -> None:
    """Write to out [group, SPAN] the dot products of `count` keys [count, dim] with the queries.

    All are pointers; shape: (group, dim).
    """
    group, dim = shape
    for g in range(0, group, 3):
        some, target = (after(queries, g * dim), dim), after(out, g * SPAN)
        for tile in range((count + TOKENS - 1) // TOKENS if count >= TOKENS else 0):
            t = min(tile * TOKENS, count - TOKENS)  # the last tile may repeat tokens
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
def _add_values(weights: Any, values: Any, count: int, shape: Any, out: Any) -> None:
    """Add to out [group, dim] the sums of `count` values, weighted by rows of `weights`.

    All are pointers, as in `_scores`.
    """
    group, dim = shape
    whole, lanes = dim // LANES * LANES, dim // WIDTH * WIDTH
    for g in range(0, group, 3):
        left = (after(weights, g * SPAN), SPAN, 1)
        for i in range(0, whole, LANES):
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
def _attend_span(cache: Any, source: Any, tokens: Any, queries: Any, running: Any) -> None:
    """Add the tokens first .. end - 1, SPAN at most, to the running softmax.

    source: as `paging.find` takes it; tokens: (first, end); queries: [group, dim]; running:
    (scores, maxima, sums, shrink, values), [group, ...] each.
    """
    first, end = tokens
    scores, tops, totals, shrink, values = running
    group, dim = queries.shape
    shape, flat = cache.shape, cache.reshape(-1)
    t = first
    while t < end:
        start, _, left = find(shape, source, t)
        some = min(left, end - t)
        _scores(at(flat, start), some, at(queries, 0), (group, dim), at(scores, t - first))
        t += some
    _reweigh(scores, end - first, tops, totals, shrink, values)
    t = first
    while t < end:
        start, to_value, left = find(shape, source, t)
        some, start = min(left, end - t), start + to_value
        _add_values(at(scores, t - first), at(flat, start), some, (group, dim), at(values, 0))
        if dim % WIDTH:
            rest = flat[start : start + some * dim].reshape(some, dim)
            _add_rest(scores[:, t - first :], rest, values)
        t += some


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
def _join(partial: Any, rows: Any, out: Any) -> None:
    maxima, sums, accumulated = partial
    _, splits, kv_heads, group, dim = accumulated.shape
    for n in range(rows.size):
        for h in range(kv_heads * group):
            head, g = h // group, h % group
            top = maxima[n, 0, head, g]
            for s in range(1, splits):
                top = max(top, maxima[n, s, head, g])
            total = np.float32(0)
            out[rows[n], h, :] = np.float32(0)
            for s in range(splits):
                weight = exp32(maxima[n, s, head, g] - top)
                total += weight * sums[n, s, head, g]
                for i in range(dim):
                    out[rows[n], h, i] += weight * accumulated[n, s, head, g, i]
            for i in range(dim):
                out[rows[n], h, i] /= total


@njit(nogil=True, cache=True)
def _attend_run(query: Any, pages: Any, decode: Any, partial: Any, task: int) -> None:
    cache, layer, tables = pages
    lines, slots, lengths = decode
    _, splits, kv_heads, group = partial[0].shape
    n, split, dim = task // splits, task % splits, query.shape[2]
    queries = np.empty((kv_heads * group, dim), np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for h in range(kv_heads * group):
        for i in range(dim):
            queries[h, i] = query[lines[n], h, i] * scale
    scores, shrink = np.empty((group, SPAN), np.float32), np.empty(group, np.float32)
    tops, totals, values = partial[0][n, split], partial[1][n, split], partial[2][n, split]
    tops[:], totals[:], values[:] = np.float32(-1e30), np.float32(0), np.float32(0)
    last = lengths[n] * (split + 1) // splits
    for first in range(lengths[n] * split // splits, last, SPAN):
        tokens = (first, min(first + SPAN, last))
        for head in range(kv_heads):
            source = (layer, head, tables[slots[n]])
            running = (scores, tops[head], totals[head], shrink, values[head])
            heads = queries[head * group : (head + 1) * group]
            _attend_span(cache, source, tokens, heads, running)


@njit(parallel=True, nogil=True, cache=True)
def attend_rows(query: Any, pages: Any, decode: Any, partial: Any, out: Any) -> None:
    """Attend from the decode rows of query [T, heads, D] to the cache.

    pages: (cache, layer, tables); decode: (rows, slots, lengths); partial: (maxima, sums, values)
    of [N, splits, kv_heads, group, ...].
    """
    for task in prange(partial[0].shape[0] * partial[0].shape[1]):
        _attend_run(query, pages, decode, partial, np.int64(task))  # else compiled twice
    _join(partial, decode[0], out)


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
        attend_rows(
            query.numpy(),
            (view(pages.cache), pages.layer, pages.tables.numpy()),
            (decode.rows.numpy(), decode.slots.numpy(), decode.lengths.numpy()),
            decode_scratch(pages.cache, heads, count, workspace),
            out.numpy(),
        )


def decode_scratch(cache: torch.Tensor, heads: int, count: int, workspace: Workspace) -> Any:
    """Return where `attend_rows` keeps what it knows of each run of tokens."""
    kv_heads, dim = cache.shape[3], cache.shape[5]
    # Enough tasks that every thread has work for a single sequence.
    splits = -(-4 * get_num_threads() // max(1, count))
    shape = (count, splits, kv_heads, heads // kv_heads)
    return (
        workspace.take("decode.maxima", shape).numpy(),
        workspace.take("decode.sums", shape).numpy(),
        workspace.take("decode.values", (*shape, dim)).numpy(),
    )
