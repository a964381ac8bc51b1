"""How long the attention kernels take, beside torch's and beside what memory bandwidth allows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from agentserve_kernels.gpu.launch import Tuning
from agentserve_kernels.gpu.paged_attention import Spans, paged_attention
from agentserve_kernels.gpu.paged_decode import SplitPlan, paged_decode
from agentserve_kernels.tensors import DecodeRows, Pages, Workspace

from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import seconds_of_each

BLOCK = 16
RESERVE_S = 4.0  # a part that is measured last leaves so much of the section's time


@dataclass(frozen=True)
class Shape:
    """The heads that are measured, and at which sizes."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    cached_bytes: int  # beyond any L2: a loop over less would measure that
    prefills: tuple[tuple[int, int], ...]  # new tokens, tokens before them
    batches: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize


# The heads of an 8B model.
GPU = Shape(
    heads=32,
    kv_heads=8,
    dim=128,
    dtype=torch.bfloat16,
    cached_bytes=256 << 20,
    prefills=((4096, 0), (2048, 32768)),
    batches=(1, 8, 64),
    contexts=(1024, 8192, 65536),
)
TINY = Shape(
    heads=2,
    kv_heads=1,
    dim=16,
    dtype=torch.float32,
    cached_bytes=1 << 12,
    prefills=((12, 4),),
    batches=(2,),
    contexts=(40,),
)


def bandwidth(device: str, size: int) -> float:
    """Return bytes a second of a copy within the device, read and write counted."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of_each(device, lambda _: target.copy_(source), 2)


@dataclass(frozen=True)
class Batch:
    """Sequences of one length in a cache of several layers, their blocks in a random order."""

    cache: torch.Tensor
    tables: torch.Tensor

    @staticmethod
    def make(device: str, shape: Shape, sequences: int, length: int) -> "Batch":
        blocks = sequences * -(-length // BLOCK)
        size = sequences * length * shape.token_bytes
        layers = max(1, min(32, shape.cached_bytes // size))
        sizes = (blocks, layers, 2, shape.kv_heads, BLOCK, shape.dim)
        cache = torch.empty(sizes, dtype=shape.dtype, device=device).normal_()
        tables = torch.randperm(blocks, device=device).int().view(sequences, -1)
        return Batch(cache, tables)

    @property
    def layers(self) -> int:
        return self.cache.shape[1]

    def pages(self, index: int) -> Pages:
        return Pages(self.cache, index % self.layers, self.tables)

    def contiguous(self, index: int, length: int) -> list[torch.Tensor]:
        """Return keys and values [tokens of all sequences, KV heads, D]."""
        record = self.cache[self.tables.long(), index % self.layers]
        both = record.permute(2, 0, 1, 4, 3, 5).flatten(2, 3)[:, :, :length].flatten(1, 2)
        return [each.contiguous() for each in both]


def ints(device: str, *lists: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.int64, device=device) for values in lists]


def random_query(device: str, shape: Shape, count: int) -> torch.Tensor:
    return torch.randn((count, shape.heads, shape.dim), device=device).to(shape.dtype)


def prefill(report: Report, device: str, shape: Shape) -> dict[str, Any]:
    """Time a chunk of one sequence: ours, torch's varlen kernel and SDPA on contiguous keys."""
    results = {}
    for count, before in shape.prefills:
        length = count + before
        batch = Batch.make(device, shape, 1, length)
        query = random_query(device, shape, count)
        out = torch.empty_like(query)
        spans = Spans(*ints(device, [0], [count], [0], [length]), count)
        keys, values = batch.contiguous(0, length)
        kinds: dict[str, Callable[[int], Any]] = {
            "ours": lambda i, q=query, b=batch, s=spans, o=out: paged_attention(
                q, b.pages(i), s, o
            ),
            "varlen": lambda _, q=query, k=keys, v=values: varlen(q, k, v, 1),
            "sdpa": lambda _, q=query, k=keys, v=values: sdpa(q, k, v),
        }
        results[f"{count} new after {before}"] = compared(device, kinds, out)
        flops = 4 * shape.heads * shape.dim * count * (before + (count + 1) / 2)
        for row in results[f"{count} new after {before}"].values():
            if isinstance(row, dict):
                row["tflop_s"] = round(flops / row["seconds"] / 1e12, 1)
        del batch, keys, values
    return results


def compared(
    device: str, kinds: dict[str, Callable[[int], Any]], out: torch.Tensor
) -> dict[str, Any]:
    """Time each kind; a yardstick that this torch does not have says why."""
    kinds["ours"](0)
    ours = out.float().clone()
    mine = seconds_of_each(device, kinds.pop("ours"), 4)
    found: dict[str, Any] = {"ours": {"seconds": mine}}
    for name, work in kinds.items():
        try:
            seconds = seconds_of_each(device, work, 4)
            other = work(0)
        except (RuntimeError, TypeError, ImportError, ValueError) as error:
            found[name] = f"not measured: {error}"[:300]
            continue
        found[name] = {
            "seconds": seconds,
            "speed_of_ours": round(seconds / mine, 3),
            "largest_difference": float((other.float() - ours).abs().max()),
        }
    return found


def varlen(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: int
) -> torch.Tensor:
    """Return torch's attention of sequences of equal lengths, one behind the other."""
    from torch.nn.attention.varlen import varlen_attn

    count, length = query.shape[0] // sequences, keys.shape[0] // sequences
    bounds = [_bounds(query.device, sequences, each) for each in (count, length)]
    return varlen_attn(
        query, keys, values, *bounds, count, length, window_size=(-1, 0), enable_gqa=True
    )


_BOUNDS: dict[tuple[int, int], torch.Tensor] = {}


def _bounds(device: torch.device, sequences: int, length: int) -> torch.Tensor:
    # Kept: a graph under capture cannot copy from the host.
    if (sequences, length) not in _BOUNDS:
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        _BOUNDS[sequences, length] = starts * length
    return _BOUNDS[sequences, length]


def sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right

    heads = [x.transpose(0, 1)[None] for x in (query, keys, values)]
    bias = causal_lower_right(query.shape[0], keys.shape[0])
    attended = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=bias, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


@dataclass(frozen=True)
class Decode:
    """One query a sequence over a batch's cache."""

    batch: Batch
    rows: DecodeRows
    query: torch.Tensor
    out: torch.Tensor
    workspace: Workspace

    @staticmethod
    def make(device: str, shape: Shape, sequences: int, length: int) -> "Decode":
        order = torch.arange(sequences, device=device)
        query = random_query(device, shape, sequences)
        return Decode(
            Batch.make(device, shape, sequences, length),
            DecodeRows(order, order, torch.full_like(order, length)),
            query,
            torch.empty_like(query),
            Workspace(device),
        )

    def attend(self, index: int, plan: SplitPlan, tuning: Tuning | None = None) -> None:
        pages = self.batch.pages(index)
        paged_decode(self.query, pages, self.rows, self.out, plan, self.workspace, tuning=tuning)

    def seconds(self, plan: SplitPlan, tuning: Tuning | None = None) -> float:
        """Return the seconds of one layer, every layer's KV read in turn."""
        calls, device = max(2, self.batch.layers), str(self.query.device)
        return seconds_of_each(device, lambda i: self.attend(i, plan, tuning), calls)


def processors_of(device: str) -> int:
    if device == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode(report: Report, device: str, shape: Shape) -> dict[str, Any]:
    """Time single tokens against the time that their keys and values take to be read."""
    rate = bandwidth(device, 16 * shape.cached_bytes)
    results: dict[str, Any] = {"copy_gb_s": round(rate / 1e9, 1)}
    for sequences in shape.batches:
        for length in shape.contexts:
            name = f"batch {sequences}, context {length}"
            size = sequences * length * shape.token_bytes
            free = torch.cuda.mem_get_info(device)[0] if device != "cpu" else 4 * size
            if 4 * size > free or report.left() < 3 * RESERVE_S:
                results[name] = "no room or no time left"
                continue
            results[name] = decoded(device, shape, sequences, length, size / rate)
            report.put(decode=results)
    return results


def decoded(device: str, shape: Shape, sequences: int, length: int, bound: float) -> dict[str, Any]:
    """Time one batch, in two kinds of splits, and torch's varlen kernel on the same keys."""
    work = Decode.make(device, shape, sequences, length)
    plans = {
        "balanced": SplitPlan.balanced(sequences, shape.kv_heads, length, processors_of(device)),
        "fixed": SplitPlan.fixed(512, length),
    }
    result: dict[str, Any] = {"bound_s": bound}
    for kind, plan in plans.items():
        seconds = work.seconds(plan)
        result[kind] = {
            "splits": plan.count,
            "seconds": seconds,
            "of_bandwidth": round(bound / seconds, 3),
        }
    layers = [work.batch.contiguous(index, length) for index in range(min(4, work.batch.layers))]
    kinds = {
        "ours": lambda i: work.attend(i % len(layers), plans["balanced"]),
        "varlen": lambda i: varlen(work.query, *layers[i % len(layers)], sequences),
    }
    return result | compared(device, kinds, work.out)


def tunings(report: Report, device: str, shape: Shape) -> dict[str, Any]:
    """Time other tiles than the chosen ones, as long as there is time: what to change next."""
    results: dict[str, Any] = {}
    sequences, length = shape.batches[len(shape.batches) // 2], shape.contexts[-1] // 8
    work = Decode.make(device, shape, sequences, length)
    plan = SplitPlan.balanced(sequences, shape.kv_heads, length, processors_of(device))
    batch = Batch.make(device, shape, 1, length)
    query = random_query(device, shape, length)
    out, spans = torch.empty_like(query), Spans(*ints(device, [0], [length], [0], [length]), length)
    for keys, warps, stages in ((32, 4, 4), (64, 4, 2), (128, 4, 2), (128, 8, 2), (64, 2, 3)):
        if report.left() > RESERVE_S:
            tuning = Tuning(rows=16, keys=keys, warps=warps, stages=stages)
            results[f"decode {tuning}"] = work.seconds(plan, tuning)
    for size, keys, warps, stages in ((128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)):
        if report.left() > RESERVE_S:
            tuning = Tuning(rows=size, keys=keys, warps=warps, stages=stages)
            results[f"prefill {tuning}"] = seconds_of_each(
                device,
                lambda i, t=tuning: paged_attention(query, batch.pages(i), spans, out, 0, t),
                2,
            )
    return results
