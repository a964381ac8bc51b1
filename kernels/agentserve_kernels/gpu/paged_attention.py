"""Attention of any mix of prefill chunks and single tokens over the paged cache, in one launch.

A program takes one KV head and a run of query tokens, with all query heads that share the KV head
as rows of one tile, and walks over the keys that these tokens see. What a row gets depends on its
own sequence only: neither on the batch nor on how the sequence was cut into chunks.
Single tokens of long sequences are better off in `paged_decode`, which divides their keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import VARYING, Launch, Tuning
from agentserve_kernels.gpu.pages import attention_arguments, visit_span
from agentserve_kernels.reference import gather_reference
from agentserve_kernels.tensors import Pages


@dataclass(frozen=True)
class Spans:
    """The step's queries by sequence: S spans of rows. int64 [S] each, on the device.

    rows: the first row of each in [T, ...]; counts: its tokens, which are the last ones of their
    sequence; slots: whose table it reads; lengths: tokens of the sequence, the span's included;
    longest: no span has more tokens (of this the host must be sure; it sizes the grid).
    """

    rows: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    longest: int


def paged_attention_reference(
    query: torch.Tensor, pages: Pages, spans: Spans, window: int = 0
) -> torch.Tensor:
    """Return what `paged_attention` computes, float32 [T, heads, D]; zeros where no span is."""
    out = torch.zeros(query.shape, device=query.device)
    lists = (spans.rows, spans.counts, spans.slots, spans.lengths)
    for row, count, slot, length in zip(*(x.tolist() for x in lists), strict=True):
        keys, values = gather_reference(pages, slot, length)
        group = query.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        heads = query[row : row + count].to(pages.cache.dtype).float().transpose(0, 1)
        scores = heads @ keys.transpose(1, 2) / query.shape[2] ** 0.5
        tokens = torch.arange(length, device=query.device)
        positions = tokens[length - count :, None]
        unseen = (tokens > positions) | ((tokens <= positions - window) & (window > 0))
        weights = torch.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1)
        out[row : row + count] = (weights @ values).transpose(0, 1)
    return out


@triton.jit(do_not_specialize=VARYING)
def paged_attention_kernel(  # noqa: PLR0913 - a kernel's arguments are flat
    query: tl.tensor,
    out: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    table_width: tl.tensor,
    block_stride: tl.tensor,
    layer: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
) -> None:
    """Take TILE_M // GROUP tokens of one span and the heads of one KV head."""
    TILE_Q: tl.constexpr = TILE_M // GROUP
    # The tiles with most keys first: the short ones fill the gaps at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_Q
    kv_head = tl.program_id(1)
    span = tl.program_id(2)
    count = tl.load(counts + span).to(tl.int32)
    if first >= count:
        return
    length = tl.load(lengths + span).to(tl.int32)
    start = length - count
    lanes = tl.arange(0, TILE_M)
    dims = tl.arange(0, PADDED)
    index = first + lanes // GROUP
    mine = (index < count) & (lanes < TILE_Q * GROUP)
    positions = start + index
    row = tl.load(rows + span).to(tl.int64) + index
    places = (row * KV_HEADS + kv_head) * GROUP + lanes % GROUP
    places = places[:, None] * DIM + dims[None, :]
    inside = mine[:, None] & (dims < DIM)[None, :]
    q = tl.load(query + places, mask=inside, other=0.0).to(cache.dtype.element_ty)
    table = tables + tl.load(slots + span).to(tl.int64) * table_width
    keys = cache + (layer * 2 * KV_HEADS + kv_head) * (BLOCK_SIZE * DIM)
    end = start + tl.minimum(first + TILE_Q, count)
    if WINDOWED:
        begin = tl.maximum(start + first - window + 1, 0)
        masked = begin // TILE_K * TILE_K
    else:
        begin = 0
        masked = (start + first + 1) // TILE_K * TILE_K
    _, sums, values = visit_span(
        q, keys, table, 0, masked, begin, end, positions, block_stride, scale, window,
        WINDOWED, BLOCK_SIZE, KV_HEADS, DIM, PADDED, TILE_K,
    )  # fmt: skip
    result = values / tl.where(sums > 0, sums, 1.0)[:, None]  # no row of mine has seen nothing
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


def attention_tuning(dim: int, dtype: torch.dtype, group: int) -> Tuning:
    """Return the tile of `paged_attention` for heads of size `dim`."""
    least = max(16, triton.next_power_of_2(group))
    if dtype is torch.float32:
        return Tuning(rows=max(least, 32), keys=32, warps=8, stages=2)
    if dim <= 128:
        return Tuning(rows=max(least, 128), keys=64, warps=8, stages=3)
    return Tuning(rows=max(least, 64), keys=32, warps=8, stages=2)


def paged_attention_launch(
    query: torch.Tensor,
    pages: Pages,
    spans: Spans,
    out: torch.Tensor,
    window: int = 0,
    tuning: Tuning | None = None,
) -> Launch:
    """Return the launch of `paged_attention`; raises as it does."""
    lists = {name: getattr(spans, name) for name in ("rows", "counts", "slots", "lengths")}
    arguments = attention_arguments(query, pages, lists, out, window)
    group = arguments["GROUP"]
    tuning = tuning or attention_tuning(query.shape[2], pages.cache.dtype, group)
    if tuning.rows < group:
        raise ValueError(f"a tile of {tuning.rows} rows for {group} query heads a KV head")
    arguments |= {"TILE_M": tuning.rows, "TILE_K": tuning.keys}
    tiles = triton.cdiv(spans.longest, tuning.rows // group)
    grid = (tiles, arguments["KV_HEADS"], spans.rows.shape[0])
    return Launch(paged_attention_kernel, grid, arguments, tuning)


def paged_attention(
    query: torch.Tensor,
    pages: Pages,
    spans: Spans,
    out: torch.Tensor,
    window: int = 0,
    tuning: Tuning | None = None,
) -> None:
    """Write the attention outputs of the spans' rows to `out`; other rows are left as they are.

    query, out: [T, heads, D], float32, bfloat16 or float16 each; queries are rounded to the
    cache's dtype, sums are float32. The tokens' own keys and values are in the cache already. A
    token sees itself and those before it, `window` tokens in all (0: every one).
    Raises ValueError for other shapes or dtypes.
    """
    paged_attention_launch(query, pages, spans, out, window, tuning).run()
