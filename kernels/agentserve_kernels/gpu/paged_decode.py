"""Attention of single query tokens over the paged cache, the keys of each divided among programs.

Split-KV as in Flash-Decoding: each program attends to one run of tokens of one sequence and KV head
and leaves its result with the logarithm of its weight; a second kernel joins the runs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import VARYING, Launch, Tuning
from agentserve_kernels.gpu.paged_attention import Spans, paged_attention_reference
from agentserve_kernels.gpu.pages import attention_arguments, visit_span
from agentserve_kernels.tensors import DecodeRows, Pages, Workspace

JOINED = 16  # splits that the join reads at a time
ROUND_TO = 128  # tokens: a split is a whole number of these, so that tiles are whole


@dataclass(frozen=True)
class SplitPlan:
    """Into how many splits the keys of a row are divided: at most `count`, none under `tokens`."""

    count: int
    tokens: int

    @staticmethod
    def fixed(tokens: int, longest: int) -> "SplitPlan":
        """Return splits of `tokens` tokens, whatever the batch: a row's bits depend on it alone.

        longest: no row attends to more tokens. Raises ValueError unless `tokens` is a multiple of
        128.
        """
        if tokens <= 0 or tokens % ROUND_TO:
            raise ValueError(f"splits of {tokens} tokens are not multiples of {ROUND_TO}")
        # One more: a window does not begin where a split does.
        return SplitPlan(-(-longest // tokens) + 1, tokens)

    @staticmethod
    def balanced(rows: int, kv_heads: int, longest: int, processors: int) -> "SplitPlan":
        """Return splits enough to keep all multiprocessors busy; another batch, other splits."""
        wanted = -(-2 * processors // max(1, rows * kv_heads))
        return SplitPlan(max(1, min(wanted, -(-longest // ROUND_TO))), ROUND_TO)


def paged_decode_reference(
    query: torch.Tensor, pages: Pages, decode: DecodeRows, window: int = 0
) -> torch.Tensor:
    """Return what `paged_decode` computes, float32 [T, heads, D]; zeros where no row is."""
    filled = decode.lengths > 0
    rows, slots, lengths = (x[filled] for x in (decode.rows, decode.slots, decode.lengths))
    spans = Spans(rows, torch.ones_like(rows), slots, lengths, 1)
    return paged_attention_reference(query, pages, spans, window)


@triton.jit
def _division(
    length: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    WINDOWED: tl.constexpr,
    ROUND_TO: tl.constexpr,
) -> Any:
    """Return (first token that is seen, where the first split begins, tokens a split)."""
    begin = tl.maximum(length - window, 0) if WINDOWED else length * 0
    base = begin // least * least  # where a split without a window would begin, too
    share = (length - base + splits - 1) // splits
    share = (share + ROUND_TO - 1) // ROUND_TO * ROUND_TO
    return begin, base, tl.maximum(share, least)


@triton.jit(do_not_specialize=[*VARYING, "splits"])
def paged_decode_kernel(  # noqa: PLR0913 - a kernel's arguments are flat
    query: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_logs: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    table_width: tl.tensor,
    block_stride: tl.tensor,
    layer: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    DIRECT: tl.constexpr,
    WINDOWED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    ROUND_TO: tl.constexpr,
) -> None:
    """Take one split of one row and KV head. DIRECT: the only one, its result is the row's."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + index).to(tl.int32)
    begin, base, size = _division(length, window, splits, least, WINDOWED, ROUND_TO)
    first = base + split * size
    if first >= length and not DIRECT:
        return
    end = tl.minimum(first + size, length)
    lanes = tl.arange(0, TILE_M)
    dims = tl.arange(0, PADDED)
    inside = (lanes < GROUP)[:, None] & (dims < DIM)[None, :]
    heads = kv_head * GROUP + lanes
    row = tl.load(rows + index).to(tl.int64)
    places = (row * (KV_HEADS * GROUP) + heads)[:, None] * DIM + dims[None, :]
    q = tl.load(query + places, mask=inside, other=0.0).to(cache.dtype.element_ty)
    table = tables + tl.load(slots + index).to(tl.int64) * table_width
    keys = cache + (layer * 2 * KV_HEADS + kv_head) * (BLOCK_SIZE * DIM)
    positions = tl.full([TILE_M], length - 1, tl.int32)
    if WINDOWED:
        masked = tl.maximum(first, begin // TILE_K * TILE_K)
    else:
        masked = tl.maximum(end // TILE_K * TILE_K, first)
    maxima, sums, values = visit_span(
        q, keys, table, first, masked, begin, end, positions, block_stride, scale, window,
        WINDOWED, BLOCK_SIZE, KV_HEADS, DIM, PADDED, TILE_K,
    )  # fmt: skip
    result = values / tl.where(sums > 0, sums, 1.0)[:, None]
    result = tl.where((sums == 0)[:, None], 0.0, result)
    if DIRECT:
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = (index.to(tl.int64) * (KV_HEADS * GROUP) + heads) * splits + split
        tl.store(parts + part[:, None] * DIM + dims[None, :], result, mask=inside)
        tl.store(part_logs + part, maxima + tl.log2(sums), mask=lanes < GROUP)


@triton.jit(do_not_specialize=["splits"])
def join_splits_kernel(  # noqa: PLR0913 - a kernel's arguments are flat
    out: tl.tensor,
    parts: tl.tensor,
    part_logs: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    WINDOWED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    JOINED: tl.constexpr,
    ROUND_TO: tl.constexpr,
) -> None:
    """Take one head of one row."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + index).to(tl.int32)
    _, base, size = _division(length, window, splits, least, WINDOWED, ROUND_TO)
    used = (length - base + size - 1) // size
    dims = tl.arange(0, PADDED)
    highest = tl.full([], -1e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    values = tl.zeros([PADDED], tl.float32)
    start = (index.to(tl.int64) * HEADS + head) * splits
    for first in range(0, used, JOINED):
        split = first + tl.arange(0, JOINED)
        logs = tl.load(part_logs + start + split, mask=split < used, other=float("-inf"))
        pointers = parts + (start + split)[:, None] * DIM + dims[None, :]
        inside = (split < used)[:, None] & (dims < DIM)[None, :]
        part = tl.load(pointers, mask=inside, other=0.0)
        raised = tl.maximum(highest, tl.max(logs, axis=0))
        weights = tl.exp2(logs - raised)
        shrink = tl.exp2(highest - raised)
        total = total * shrink + tl.sum(weights, axis=0)
        values = values * shrink + tl.sum(part * weights[:, None], axis=0)
        highest = raised
    result = values / tl.where(used > 0, total, 1.0)
    target = out + (tl.load(rows + index).to(tl.int64) * HEADS + head) * DIM + dims
    tl.store(target, result.to(out.dtype.element_ty), mask=dims < DIM)


def decode_tuning(dim: int, dtype: torch.dtype, group: int) -> Tuning:
    """Return the tile of `paged_decode` for heads of size `dim`; `keys` divides 128."""
    rows = max(16, triton.next_power_of_2(group))
    if dtype is torch.float32:
        return Tuning(rows=rows, keys=32, warps=4 if dim <= 64 else 8, stages=2)
    # The ids are loaded a stage ahead of the keys: five stages are two tiles in flight.
    return Tuning(rows=rows, keys=64 if dim <= 128 else 32, warps=4, stages=5)


def paged_decode_launches(  # noqa: PLR0913 - as `paged_decode`
    query: torch.Tensor,
    pages: Pages,
    decode: DecodeRows,
    out: torch.Tensor,
    plan: SplitPlan,
    workspace: Workspace,
    window: int = 0,
    tuning: Tuning | None = None,
) -> list[Launch]:
    """Return the launches of `paged_decode`, in order; raises as it does."""
    attend = attention_arguments(query, pages, vars(decode), out, window)
    group, kv_heads = attend["GROUP"], attend["KV_HEADS"]
    count, (_, heads, dim) = decode.rows.shape[0], query.shape
    tuning = tuning or decode_tuning(dim, pages.cache.dtype, group)
    if ROUND_TO % tuning.keys or tuning.rows < group:
        raise ValueError(f"{tuning} for {group} query heads a KV head")
    direct = plan.count == 1
    parts = out if direct else workspace.take("decode.parts", (count, heads, plan.count, dim))
    logs = out if direct else workspace.take("decode.logs", (count, heads, plan.count))
    division = {
        "parts": parts,
        "part_logs": logs,
        "splits": plan.count,
        "least": plan.tokens,
        "ROUND_TO": ROUND_TO,
    }
    tile = {"DIRECT": direct, "TILE_M": tuning.rows, "TILE_K": tuning.keys}
    grid = (count, kv_heads, plan.count)
    launches = [Launch(paged_decode_kernel, grid, attend | division | tile, tuning)]
    if not direct:
        again = ("out", "rows", "lengths", "window", "WINDOWED", "DIM", "PADDED")
        join = division | {name: attend[name] for name in again}
        join |= {"HEADS": heads, "JOINED": JOINED}
        launches.append(Launch(join_splits_kernel, (count, heads), join))
    return launches


def paged_decode(  # noqa: PLR0913 - two of them optional
    query: torch.Tensor,
    pages: Pages,
    decode: DecodeRows,
    out: torch.Tensor,
    plan: SplitPlan,
    workspace: Workspace,
    window: int = 0,
    tuning: Tuning | None = None,
) -> None:
    """Write the attention outputs of the decode rows to their rows of `out`.

    query, out: [T, heads, D], float32, bfloat16 or float16 each; queries are rounded to the
    cache's dtype, sums are float32. The tokens' own keys and values are in the cache already. A
    row of length 0 (it fills a batch) gets zeros. A token sees `window` tokens, itself included
    (0: every one). The workspace is one of the query's device. Raises ValueError for other shapes
    or dtypes.
    """
    for launch in paged_decode_launches(query, pages, decode, out, plan, workspace, window, tuning):
        launch.run()
