"""From a fused QKV projection to rotated queries and keys and values in the paged cache.

Per token: optional RMSNorm of each query and key head (Qwen3), rotary embedding (arXiv 2104.09864,
halves paired as d and d + D/2), then K and V go to their place in the block.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from agentserve_kernels.scalar import FAST, narrow
from agentserve_kernels.tensors import (
    PARALLEL_ROWS,
    HeadNorm,
    Pages,
    Placement,
    Rotary,
    check,
    view,
)


@njit(fastmath=FAST, nogil=True, cache=True)
def _normalise(head: Any, weight: Any, eps: Any) -> None:
    square = np.float32(0)
    for i in range(head.size):
        square += head[i] * head[i]
    scale = np.float32(1) / np.sqrt(square / np.float32(head.size) + eps)
    for i in range(head.size):
        head[i] = head[i] * scale * weight[i]


@njit(nogil=True, cache=True)
def _rotate(head: Any, cos: Any, sin: Any) -> None:
    half = cos.size
    for i in range(half):
        low, high = head[i], head[half + i]
        head[i] = low * cos[i] - high * sin[i]
        head[half + i] = high * cos[i] + low * sin[i]


def _rows(qkv: Any, pages: Any, place: Any, rotary: Any, norm: Any, query: Any) -> None:
    cache, layer = pages
    positions, blocks = place
    cos, sin = rotary
    query_norm, key_norm, eps = norm
    kv_heads, block_size, dim = cache.shape[3], cache.shape[4], cache.shape[5]
    heads = query.shape[1]
    one = cache[0, 0, 0, 0, 0, 0]
    for row in prange(qkv.shape[0]):
        position, block = positions[row], blocks[row]
        offset = position % block_size
        for h in range(heads + kv_heads):
            head = qkv[row, h * dim : (h + 1) * dim]
            if query_norm.size:
                _normalise(head, query_norm if h < heads else key_norm, eps)
            _rotate(head, cos[position], sin[position])
        for h in range(heads):
            for i in range(dim):
                query[row, h, i] = qkv[row, h * dim + i]
        for h in range(kv_heads):
            for i in range(dim):
                k = qkv[row, (heads + h) * dim + i]
                v = qkv[row, (heads + kv_heads + h) * dim + i]
                cache[block, layer, 0, h, offset, i] = narrow(one, k)
                cache[block, layer, 1, h, offset, i] = narrow(one, v)


_serial = njit(nogil=True, cache=True)(_rows)
_parallel = njit(parallel=True, nogil=True, cache=True)(_rows)


@njit(nogil=True, cache=True)
def write_rows(qkv: Any, pages: Any, place: Any, rotary: Any, norm: Any, query: Any) -> None:
    """Do what `kv_write` does, on arrays; callable from numba."""
    if qkv.shape[0] < PARALLEL_ROWS:
        _serial(qkv, pages, place, rotary, norm, query)
    else:
        _parallel(qkv, pages, place, rotary, norm, query)


def norm_arrays(norm: HeadNorm | None) -> tuple[Any, Any, Any]:
    """Return what the compiled kernels take; empty weights mean that there is no norm."""
    if norm is None:
        return np.empty(0, np.float32), np.empty(0, np.float32), np.float32(0)
    return norm.query.numpy(), norm.key.numpy(), np.float32(norm.eps)


def kv_write(
    qkv: torch.Tensor,
    pages: Pages,
    place: Placement,
    rotary: Rotary,
    norm: HeadNorm | None,
    query: torch.Tensor,
) -> torch.Tensor:
    """Write keys and values of T tokens to the cache and their queries to `query`; return that.

    qkv: [T, (heads + 2 * kv_heads) * D] float32, overwritten; query: [T, heads, D] float32. Raises
    ValueError for other shapes or dtypes.
    """
    rows, heads, dim = query.shape
    kv_heads = pages.cache.shape[3]
    pages.check(heads, dim)
    check("qkv", qkv, (rows, (heads + 2 * kv_heads) * dim), torch.float32)
    check("query", query, (rows, heads, dim), torch.float32)
    check("positions", place.positions, (rows,), torch.int64)
    check("blocks", place.blocks, (rows,), torch.int64)
    check("cos", rotary.cos, (rotary.cos.shape[0], dim // 2), torch.float32)
    write_rows(
        qkv.numpy(),
        (view(pages.cache), pages.layer),
        (place.positions.numpy(), place.blocks.numpy()),
        (rotary.cos.numpy(), rotary.sin.numpy()),
        norm_arrays(norm),
        query.numpy(),
    )
    return query
