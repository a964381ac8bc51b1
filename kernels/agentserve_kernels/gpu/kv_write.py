"""From a fused QKV projection to rotated queries and keys and values in the paged cache.

Per token: optional RMSNorm of each query and key head (Qwen3), rotary embedding (arXiv 2104.09864,
halves paired as d and d + D/2), then K and V go to their place in the block.
Reference: `reference.kv_write_reference`.
"""

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import STORAGE, VARYING, Launch
from agentserve_kernels.gpu.pages import check_pages
from agentserve_kernels.tensors import HeadNorm, Pages, Placement, Rotary, check

HEADS_A_TILE = 8


@triton.jit(do_not_specialize=VARYING)
def kv_write_kernel(  # noqa: PLR0913 - a kernel's arguments are flat
    qkv: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    positions: tl.tensor,
    blocks: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Take one row of the step and TILE of its heads: queries, then keys, then values."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    if block < 0:
        return
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pairs = tl.arange(0, HALF)
    inside = (heads < HEADS + 2 * KV_HEADS)[:, None] & (pairs < DIM // 2)[None, :]
    places = heads[:, None] * DIM + pairs[None, :]
    source = qkv + row * (HEADS + 2 * KV_HEADS) * DIM + places
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    is_query = (heads < HEADS)[:, None]
    rotates = (heads < HEADS + KV_HEADS)[:, None]
    if NORM:
        squares = tl.sum(low * low + high * high, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        weights = tl.where(is_query, query_norm, key_norm) + pairs[None, :]
        normed = inside & rotates
        low = tl.where(rotates, low * scale * tl.load(weights, mask=normed, other=0.0), low)
        upper = tl.load(weights + DIM // 2, mask=normed, other=0.0)
        high = tl.where(rotates, high * scale * upper, high)
    angles = position * (DIM // 2) + pairs
    c = tl.load(cos + angles, mask=pairs < DIM // 2, other=0.0)[None, :]
    s = tl.load(sin + angles, mask=pairs < DIM // 2, other=0.0)[None, :]
    turned = tl.where(rotates, low * c - high * s, low)
    high = tl.where(rotates, high * c + low * s, high)
    target = query + row * HEADS * DIM + places
    dtype = query.dtype.element_ty
    tl.store(target, turned.to(dtype), mask=inside & is_query)
    tl.store(target + DIM // 2, high.to(dtype), mask=inside & is_query)
    # What is not a query goes to record [layer, K or V, KV head, token] of the block.
    stored = heads - HEADS
    kept = (layer * 2 * KV_HEADS + stored) * (BLOCK_SIZE * DIM) + (position % BLOCK_SIZE) * DIM
    target = cache + block * block_stride + kept[:, None] + pairs[None, :]
    dtype = cache.dtype.element_ty
    tl.store(target, turned.to(dtype), mask=inside & ~is_query)
    tl.store(target + DIM // 2, high.to(dtype), mask=inside & ~is_query)


def kv_write_launch(
    qkv: torch.Tensor,
    pages: Pages,
    place: Placement,
    rotary: Rotary,
    norm: HeadNorm | None,
    query: torch.Tensor,
) -> Launch:
    """Return the launch of `kv_write`; raises as it does."""
    rows, heads, dim = query.shape
    kv_heads, block_size = pages.cache.shape[3:5]
    total = heads + 2 * kv_heads
    check_pages(pages, dim)
    check("qkv", qkv, (rows, total * dim), *STORAGE)
    check("query", query, (rows, heads, dim), *STORAGE)
    check("positions", place.positions, (rows,), torch.int64)
    check("blocks", place.blocks, (rows,), torch.int64)
    for name, angles in vars(rotary).items():
        check(name, angles, (rotary.cos.shape[0], dim // 2), torch.float32)
    if norm is not None:
        check("query norm", norm.query, (dim,), torch.float32)
        check("key norm", norm.key, (dim,), torch.float32)
    arguments = {
        "qkv": qkv,
        "query": query,
        "cache": pages.cache,
        "positions": place.positions,
        "blocks": place.blocks,
        "cos": rotary.cos,
        "sin": rotary.sin,
        "query_norm": rotary.cos if norm is None else norm.query,
        "key_norm": rotary.cos if norm is None else norm.key,
        "eps": 0.0 if norm is None else norm.eps,
        "layer": pages.layer,
        "block_stride": pages.cache.stride(0),
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "DIM": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "NORM": norm is not None,
        "TILE": HEADS_A_TILE,
    }
    return Launch(kv_write_kernel, (rows, triton.cdiv(total, HEADS_A_TILE)), arguments)


def kv_write(
    qkv: torch.Tensor,
    pages: Pages,
    place: Placement,
    rotary: Rotary,
    norm: HeadNorm | None,
    query: torch.Tensor,
) -> torch.Tensor:
    """Write keys and values of T tokens to the cache and their queries to `query`; return that.

    qkv: [T, (heads + 2 * kv_heads) * D], not changed; query: [T, heads, D]; float32, bfloat16 or
    float16 each. A row whose block is negative is skipped, and leaves its queries as they are: it
    fills a batch up to a captured size. Raises ValueError for other shapes or dtypes.
    """
    kv_write_launch(qkv, pages, place, rotary, norm, query).run()
    return query
