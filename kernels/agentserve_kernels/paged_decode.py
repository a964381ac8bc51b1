"""Attention of single query tokens over the paged cache: one pass, read through the block table.

Each task takes one sequence, one KV head and a run of blocks (split-KV, as in Flash-Decoding), with
a running maximum (online softmax, arXiv 1805.02867); a second pass joins the runs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from agentserve_kernels.scalar import exp32, widen
from agentserve_kernels.tensors import STORAGE, Workspace, check, view


@dataclass(frozen=True)
class DecodeRows:
    """The step's single-token rows: N queries.

    rows: where each query and output lies in [T, ...]; slots: whose table it reads;
    lengths: tokens to attend to, its own included. int64 [N] each.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor


def gather_reference(
    cache: torch.Tensor, layer: int, table: torch.Tensor, length: int
) -> torch.Tensor:
    """Return keys and values [2, kv_heads, length, D] in float32 of one sequence."""
    blocks = cache[table[: -(-length // cache.shape[4])].long(), layer]
    _, _, kv_heads, _, dim = blocks.shape
    return blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length].float()


def paged_decode_reference(
    query: torch.Tensor, cache: torch.Tensor, layer: int, tables: torch.Tensor, decode: DecodeRows
) -> torch.Tensor:
    """Return the attention outputs [N, heads, D] of the decode rows, with torch operations."""
    outputs = []
    for row, slot, length in zip(
        decode.rows.tolist(), decode.slots.tolist(), decode.lengths.tolist(), strict=True
    ):
        keys, values = gather_reference(cache, layer, tables[slot], length)
        heads = query[row].view(keys.shape[0], -1, query.shape[2])
        weights = torch.softmax(heads @ keys.transpose(1, 2) / query.shape[2] ** 0.5, dim=-1)
        outputs.append((weights @ values).view(-1, query.shape[2]))
    return torch.stack(outputs)


@njit(fastmath=True, nogil=True, cache=True)
def _attend(query: Any, keys: Any, values: Any, count: int, state: Any) -> None:
    """Fold `count` tokens of a block into the running (scores, maxima, sums, sums of values)."""
    scores, maxima, sums, accumulated = state
    group, dim = query.shape
    for t in range(count):
        for g in range(group):
            dot = np.float32(0)
            for i in range(dim):
                dot += query[g, i] * widen(keys[t, i])
            scores[g, t] = dot
    for g in range(group):
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
        for i in range(dim):
            accumulated[g, i] *= shrink
    for t in range(count):
        for g in range(group):
            weight = scores[g, t]
            for i in range(dim):
                accumulated[g, i] += weight * widen(values[t, i])


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def _partial(query: Any, cache: Any, layer: int, tables: Any, decode: Any, partial: Any) -> None:
    rows, slots, lengths = decode
    maxima, sums, accumulated = partial
    kv_heads, block_size, dim = cache.shape[3], cache.shape[4], cache.shape[5]
    group = query.shape[1] // kv_heads
    splits = maxima.shape[2]
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for task in prange(rows.size * kv_heads * splits):
        n, rest = task // (kv_heads * splits), task % (kv_heads * splits)
        head, split = rest // splits, rest % splits
        blocks = (lengths[n] + block_size - 1) // block_size
        first, last = blocks * split // splits, blocks * (split + 1) // splits
        scaled = query[rows[n], head * group : (head + 1) * group] * scale
        state = (
            np.empty((group, block_size), np.float32),
            maxima[n, head, split],
            sums[n, head, split],
            accumulated[n, head, split],
        )
        state[1][:] = np.float32(-1e30)
        state[2][:] = np.float32(0)
        state[3][:] = np.float32(0)
        for b in range(first, last):
            block = np.int64(tables[slots[n], b])
            count = min(block_size, lengths[n] - b * block_size)
            record = cache[block, layer]
            _attend(scaled, record[0, head], record[1, head], count, state)


@njit(fastmath=True, nogil=True, cache=True)
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
    cache: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    decode: DecodeRows,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Write the attention outputs of the decode rows to their rows of `out`.

    query, out: [T, heads, D] float32; cache: [blocks, layers, 2, kv_heads, block_size, D] float32
    or bfloat16; tables: [slots, blocks a sequence] int32. The tokens' own keys and values are in
    the cache already. Raises ValueError for other shapes or dtypes.
    """
    _, heads, dim = query.shape
    kv_heads, count = cache.shape[3], decode.rows.shape[0]
    check("query", query, (query.shape[0], heads, dim), torch.float32)
    check("out", out, tuple(query.shape), torch.float32)
    check("cache", cache, (*cache.shape[:5], dim), *STORAGE)
    check("tables", tables, (tables.shape[0], tables.shape[1]), torch.int32)
    for name, tensor in vars(decode).items():
        check(name, tensor, (count,), torch.int64)
    # Enough tasks that every thread has work for a single sequence with one KV head.
    splits = max(1, -(-2 * get_num_threads() // (count * kv_heads))) if count else 1
    shape = (count, kv_heads, splits, heads // kv_heads)
    partial = (
        workspace.take("decode.maxima", shape).numpy(),
        workspace.take("decode.sums", shape).numpy(),
        workspace.take("decode.values", (*shape, dim)).numpy(),
    )
    rows = decode.rows.numpy()
    lists = (rows, decode.slots.numpy(), decode.lengths.numpy())
    _partial(query.numpy(), view(cache), layer, tables.numpy(), lists, partial)
    _join(partial, rows, out.numpy())
