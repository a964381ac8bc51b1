"""The paged cache as the kernels of a GPU read it: one step of attention over a tile of its keys.

The running softmax (arXiv 1805.02867) and the tiling over keys are those of FlashAttention (arXiv
2205.14135). Both attention kernels are `visit_span` with something before and after it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import STORAGE
from agentserve_kernels.tensors import Pages, check

LOG2_E = 1.4426950408889634


def check_pages(pages: Pages, dim: int) -> None:
    """Raise ValueError unless cache and tables have the documented shape; float16 is stored too."""
    cache, tables = pages.cache, pages.tables
    if cache.dim() != 6 or tables.dim() != 2:
        raise ValueError(f"cache {tuple(cache.shape)}, tables {tuple(tables.shape)}")
    check("cache", cache, (*cache.shape[:2], 2, *cache.shape[3:5], dim), *STORAGE)
    check("tables", tables, tuple(tables.shape), torch.int32)
    if not 0 <= pages.layer < cache.shape[1]:
        raise ValueError(f"layer {pages.layer} of {cache.shape[1]}")
    if dim % 2:
        raise ValueError(f"heads of odd size {dim}")


def attention_arguments(
    query: torch.Tensor,
    pages: Pages,
    lists: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    window: int,
) -> dict[str, Any]:
    """Return the arguments that both attention kernels take.

    query, out: [T, heads, D]; lists: `rows`, `slots`, `lengths` and whatever else a kernel wants,
    int64 [N] each; window: tokens, 0 for all. Raises ValueError for other shapes or dtypes.
    """
    total, heads, dim = query.shape
    check_pages(pages, dim)
    kv_heads, block_size = pages.cache.shape[3:5]
    check("query", query, (total, heads, dim), *STORAGE)
    check("out", out, (total, heads, dim), *STORAGE)
    for name, tensor in lists.items():
        check(name, tensor, tuple(lists["rows"].shape), torch.int64)
    group, rest = divmod(heads, kv_heads)
    if rest:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    if window < 0:
        raise ValueError(f"window {window}")
    return dict(lists) | {
        "query": query,
        "out": out,
        "cache": pages.cache,
        "tables": pages.tables,
        "table_width": pages.tables.stride(0),
        "block_stride": pages.cache.stride(0),
        "layer": pages.layer,
        "scale": LOG2_E / math.sqrt(dim),  # q . k as the exponent of 2 of its softmax weight
        "window": window,
        "WINDOWED": window > 0,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "DIM": dim,
        "PADDED": max(16, triton.next_power_of_2(dim)),
    }


@triton.jit
def _load_tile(
    pointers: tl.tensor,
    read: tl.tensor,
    dims: tl.tensor,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> Any:
    # Rows that are not read become zero: what was never written may be NaN, and 0 * NaN is NaN.
    if MASKED and DIM != PADDED:
        tile = tl.load(pointers, mask=read[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=read[:, None], other=0.0)
    elif DIM != PADDED:
        tile = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _visit_keys(  # noqa: PLR0913 - a kernel's arguments are flat
    state: tl.tuple,
    query: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    positions: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_K: tl.constexpr,
) -> Any:
    """Return (maxima, sums, values) after the tokens first .. first + TILE_K - 1 of a sequence.

    query: [M, PADDED]; keys: this layer's and KV head's keys in block 0. Tokens outside begin ..
    end - 1 are not read; with MASKED a row sees only those up to its position, within the window.
    """
    maxima, sums, values = state
    tokens = first + tl.arange(0, TILE_K)
    read = (tokens >= begin) & (tokens < end)
    dims = tl.arange(0, PADDED)
    if MASKED:
        ids = tl.load(table + tokens // BLOCK_SIZE, mask=read, other=0)
    else:
        ids = tl.load(table + tokens // BLOCK_SIZE)
    places = ids.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * DIM
    pointers = keys + places[:, None] + dims[None, :]
    k = _load_tile(pointers, read, dims, MASKED, DIM, PADDED)
    v = _load_tile(pointers + KV_HEADS * BLOCK_SIZE * DIM, read, dims, MASKED, DIM, PADDED)
    # Of float32 three products make one that is about as exact, and tensor cores can do them.
    scores = tl.dot(query, tl.trans(k), input_precision="tf32x3") * scale
    if MASKED:
        seen = read[None, :] & (tokens[None, :] <= positions[:, None])
        if WINDOWED:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(maxima, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(maxima - highest)
    sums = sums * shrink + tl.sum(weights, axis=1)
    values = values * shrink[:, None]
    values = tl.dot(weights.to(v.dtype), v, values, input_precision="tf32x3")
    return highest, sums, values


@triton.jit
def visit_span(  # noqa: PLR0913 - a kernel's arguments are flat
    query: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    masked: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    positions: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_K: tl.constexpr,
) -> Any:
    """Return (maxima, sums, values) of the tokens first .. end - 1; arguments as `_visit_keys`.

    Every row sees every token before `masked`, a multiple of TILE_K from `first`. With a window
    nobody is sure of that, and only the tokens from `masked` on are visited.
    """
    state = (
        tl.full([query.shape[0]], -1e30, tl.float32),
        tl.zeros([query.shape[0]], tl.float32),
        tl.zeros([query.shape[0], PADDED], tl.float32),
    )
    if not WINDOWED:
        for tile in range(first, masked, TILE_K):
            state = _visit_keys(
                state, query, keys, table, tile, begin, end, positions, block_stride, scale, window,
                False, WINDOWED, BLOCK_SIZE, KV_HEADS, DIM, PADDED, TILE_K,
            )  # fmt: skip
    for tile in range(masked, end, TILE_K):
        state = _visit_keys(
            state, query, keys, table, tile, begin, end, positions, block_stride, scale, window,
            True, WINDOWED, BLOCK_SIZE, KV_HEADS, DIM, PADDED, TILE_K,
        )  # fmt: skip
    return state
