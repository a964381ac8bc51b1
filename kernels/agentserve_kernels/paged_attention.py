"""Attention of a step over the paged cache, as one parallel region.

Chunks of new tokens, and prefixes that decode rows share, are matrix products (`paged_prefill`);
what a decode row has for itself is read once, for it alone (`paged_decode`). The tasks of all are
claimed by the threads one by one, the large ones first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from agentserve_kernels.claims import claim
from agentserve_kernels.paged_decode import attend_run, decode_scratch, join_runs
from agentserve_kernels.paged_prefill import attend_panels, count_tiles, panel_scratch
from agentserve_kernels.prefixes import shared_prefixes
from agentserve_kernels.registers import COLUMNS
from agentserve_kernels.tensors import Chunk, DecodeRows, Pages, Workspace, check, view


@njit(nogil=True, cache=True)
def _attend_chunk(query: Any, pages: Any, chunk: Any, place: Any, work: Any, out: Any) -> None:
    """Attend from some rows of a chunk, (slot, lines, start). place: (KV head, tile)."""
    cache, layer, tables = pages
    slot, lines, start = chunk
    head, tile = place
    group = query.shape[1] // cache.shape[3]
    tokens, source = (lines, start + 1, 1), (layer, head, tables[slot])
    first, end = attend_panels(query, tokens, cache, source, tile, work)
    _, sums, values = work[5:]
    for r in range(first, end):
        panel, lane = (r - first) // COLUMNS, (r - first) % COLUMNS
        line, own = lines[r // group], head * group + r % group
        inverse = np.float32(1) / sums[panel, lane]
        for i in range(values.shape[1]):
            out[line, own, i] = values[panel, i, lane] * inverse


@njit(nogil=True, cache=True)
def _attend_prefix(query: Any, pages: Any, rows: Any, prefix: Any, place: Any, work: Any) -> None:
    """Attend from some decode rows to what they share, (members, tokens), as their last run.

    rows: (decode, partial), as `attend_run` takes them; place: (KV head, tile).
    """
    cache, layer, tables = pages
    (lines, slots, _, _), partial = rows
    members, length = prefix
    head, tile = place
    group, last = query.shape[1] // cache.shape[3], partial[0].shape[1] - 1
    tokens, source = (lines[members], length, 0), (layer, head, tables[slots[members[0]]])
    first, end = attend_panels(query, tokens, cache, source, tile, work)
    maxima, sums, values = work[5:]
    for r in range(first, end):
        panel, lane = (r - first) // COLUMNS, (r - first) % COLUMNS
        n, g = members[r // group], r % group
        partial[0][n, last, head, g] = maxima[panel, lane]
        partial[1][n, last, head, g] = sums[panel, lane]
        for i in range(values.shape[1]):
            partial[2][n, last, head, g, i] = values[panel, i, lane]


@njit(nogil=True, cache=True)
def _attend_claimed(query: Any, pages: Any, step: Any, work: Any, out: Any) -> None:
    """Do tasks until none is left. step: (decode, groups, partial, (claims, threads))."""
    decode, (spans, lines), partial, (claims, threads) = step
    kv_heads, group = pages[0].shape[3], query.shape[1] // pages[0].shape[3]
    least = (2 * threads + kv_heads - 1) // kv_heads  # two tasks a thread even out what they take
    runs = partial[0].shape[0] * (partial[0].shape[1] - 1)
    number, before = 0, 0
    while True:
        task = claim(claims) - before
        while number < spans.shape[0]:
            # Beside a prefix there are the members' own runs to even it out.
            wanted = least if spans[number, 0] >= 0 else 1
            tiles = count_tiles(spans[number, 2] - spans[number, 1], group, wanted)
            if task < tiles * kv_heads:
                break
            task -= tiles * kv_heads
            before += tiles * kv_heads
            number += 1
        if number < spans.shape[0]:
            slot, first, end, length = spans[number]
            some = lines[first:end]
            tile = (tiles - 1 - task // kv_heads, tiles)  # the longest first
            place = (task % kv_heads, tile)
            if slot >= 0:
                _attend_chunk(query, pages, (slot, some, length), place, work, out)
            else:
                _attend_prefix(query, pages, (decode, partial), (some, length), place, work)
        elif task < runs:
            attend_run(query, pages, decode, partial, task)
        else:
            return


@njit(parallel=True, nogil=True, cache=True)
def attend(query: Any, pages: Any, decode: Any, groups: Any, scratch: Any, out: Any) -> None:
    """Write the attention outputs of all rows of query [T, heads, D] to `out`.

    pages: (cache, layer, tables); decode and groups: as `plan_attention` gives them; scratch: as
    `attention_scratch` does.
    """
    panels, partial = scratch
    keys, values, queries, scores, shrink, maxima, sums, sofar = panels
    crew = (np.zeros(1, np.int64), keys.shape[0])
    for n in prange(keys.shape[0]):
        work = (keys[n], values[n], queries[n], scores[n], shrink[n], maxima[n], sums[n], sofar[n])
        _attend_claimed(query, pages, (decode, groups, partial, crew), work, out)
    join_runs(partial, decode, out)


def plan_attention(
    decode: DecodeRows, chunks: Sequence[Chunk], tables: torch.Tensor, block_size: int
) -> tuple[Any, Any]:
    """Return what `attend` needs to know of a step, for all its layers.

    (rows, slots, lengths, tokens of a shared prefix) of the decode rows, int64 [N] each; and the
    groups: (spans, lines). A span is (slot, first and end in lines, start) of a chunk, whose lines
    are rows of the step; or (-1, first and end, tokens) of a prefix, whose lines are decode rows.
    """
    rows, slots, lengths = decode.rows.numpy(), decode.slots.numpy(), decode.lengths.numpy()
    shared = np.zeros_like(lengths)
    spans: list[tuple[int, int, int, int]] = []
    lines: list[Any] = [np.empty(0, np.int64)]

    def add(slot: int, some: Any, length: int) -> None:
        first = spans[-1][2] if spans else 0
        spans.append((slot, first, first + len(some), length))
        lines.append(some)

    for chunk in chunks:
        add(chunk.slot, np.arange(chunk.row, chunk.row + chunk.count), chunk.start)
    for members, tokens in shared_prefixes(tables.numpy()[slots], lengths, block_size):
        add(-1, members, tokens)
        shared[members] = tokens
    groups = np.array(spans, np.int64).reshape(-1, 4), np.concatenate(lines)
    return (rows, slots, lengths, shared), groups


def attention_scratch(cache: torch.Tensor, heads: int, rows: int, workspace: Workspace) -> Any:
    """Return what `attend` works on, for so many decode rows."""
    panels = panel_scratch(cache.shape[5], workspace)
    return panels, decode_scratch(cache, heads, rows, workspace)


def paged_attention(
    query: torch.Tensor,
    pages: Pages,
    decode: DecodeRows,
    chunks: Sequence[Chunk],
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Write the attention outputs of the decode rows and of the chunks to their rows of `out`.

    query, out: [T, heads, D] float32. The tokens' own keys and values are in the cache already.
    Raises ValueError for other shapes or dtypes.
    """
    _, heads, dim = query.shape
    count = decode.rows.shape[0]
    check("query", query, (query.shape[0], heads, dim), torch.float32)
    check("out", out, tuple(query.shape), torch.float32)
    pages.check(heads, dim)
    for name, tensor in vars(decode).items():
        check(name, tensor, (count,), torch.int64)
    rows, groups = plan_attention(decode, chunks, pages.tables, pages.cache.shape[4])
    attend(
        query.numpy(),
        (view(pages.cache), pages.layer, pages.tables.numpy()),
        rows,
        groups,
        attention_scratch(pages.cache, heads, count, workspace),
        out.numpy(),
    )
