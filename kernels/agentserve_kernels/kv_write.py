"""From a fused QKV projection to rotated queries and keys and values in the paged cache.

Per token: optional RMSNorm of each query and key head (Qwen3), rotary embedding (arXiv 2104.09864,
halves paired as d and d + D/2), then K and V go to their place in the block.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from agentserve_kernels.scalar import FAST, narrow
from agentserve_kernels.tensors import Pages, check, view


@dataclass(frozen=True)
class Rotary:
    """cos and sin of position * frequency: [positions, D / 2] float32 each."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm weights of query and key heads: [D] float32 each."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Placement:
    """Where each token of a step belongs: its position, and the block that holds it. int64 [T]."""

    positions: torch.Tensor
    blocks: torch.Tensor


def rotate_reference(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, heads, D] by cos and sin [T, D / 2]."""
    low, high = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def kv_write_reference(
    qkv: torch.Tensor,
    pages: Pages,
    place: Placement,
    rotary: Rotary,
    norm: HeadNorm | None,
) -> torch.Tensor:
    """Do what `kv_write` does, with torch operations; return the queries [T, heads, D]."""
    cache, layer = pages.cache, pages.layer
    kv_heads, block_size, dim = cache.shape[3:]
    heads = qkv.view(qkv.shape[0], -1, dim)
    query, key, value = torch.tensor_split(heads, (-2 * kv_heads, -kv_heads), dim=1)
    if norm is not None:
        query = torch.nn.functional.rms_norm(query, (dim,), norm.query, norm.eps)
        key = torch.nn.functional.rms_norm(key, (dim,), norm.key, norm.eps)
    cos, sin = rotary.cos[place.positions], rotary.sin[place.positions]
    offsets = place.positions % block_size
    key = rotate_reference(key, cos, sin)
    cache[place.blocks, layer, 0, :, offsets] = key.to(cache.dtype)
    cache[place.blocks, layer, 1, :, offsets] = value.to(cache.dtype)
    return rotate_reference(query, cos, sin)


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


write_rows = njit(nogil=True, cache=True)(_rows)
_parallel = njit(parallel=True, nogil=True, cache=True)(_rows)


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
    pages.check(dim)
    check("qkv", qkv, (rows, (heads + 2 * kv_heads) * dim), torch.float32)
    check("query", query, (rows, heads, dim), torch.float32)
    check("positions", place.positions, (rows,), torch.int64)
    check("blocks", place.blocks, (rows,), torch.int64)
    check("cos", rotary.cos, (rotary.cos.shape[0], dim // 2), torch.float32)
    _parallel(
        qkv.numpy(),
        (view(pages.cache), pages.layer),
        (place.positions.numpy(), place.blocks.numpy()),
        (rotary.cos.numpy(), rotary.sin.numpy()),
        norm_arrays(norm),
        query.numpy(),
    )
    return query
