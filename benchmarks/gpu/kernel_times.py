"""How long the GPU kernels take, beside torch's and beside what memory bandwidth allows.

Attention is measured at the heads of an 8B model (32 query heads, 8 KV heads of 128, bfloat16).
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from agentserve_kernels.gpu.blocks import gather_blocks
from agentserve_kernels.gpu.launch import Tuning
from agentserve_kernels.gpu.norm import add_rms_norm
from agentserve_kernels.gpu.paged_attention import Spans, paged_attention
from agentserve_kernels.gpu.paged_decode import SplitPlan, paged_decode
from agentserve_kernels.gpu.sampling import sample
from agentserve_kernels.gpu.sampling_rows import SamplingRows
from agentserve_kernels.tensors import DecodeRows, Pages, Workspace

from benchmarks.gpu.report import Report

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
CACHED_BYTES = 256 * 2**20  # beyond any L2: a loop over less would measure that
REPEATS = 5
PREFILLS = ((4096, 0), (2048, 32768))  # new tokens, tokens before them
BATCHES, CONTEXTS = (1, 8, 64), (1024, 8192, 65536)
RESERVE_S = 4.0  # a part that is measured last leaves so much of the section's time


def seconds_of_each(work: Callable[[int], Any], calls: int) -> float:
    """Return the median seconds of `work(i)`, i = 0 .. calls - 1, queued one behind the other.

    In a CUDA graph, as a decode step has them: the host's time for a launch does not count.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work(0)  # compiles
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            work(index)
    seconds = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(seconds[1:])  # the first touches memory


def bandwidth(device: str) -> float:
    """Return bytes a second of a copy within the device, read and write counted."""
    source = torch.empty(2**30, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of_each(lambda _: target.copy_(source), 2)


@dataclass(frozen=True)
class Batch:
    """Sequences of one length in a cache of several layers, their blocks in a random order."""

    cache: torch.Tensor
    tables: torch.Tensor

    @staticmethod
    def make(device: str, sequences: int, length: int) -> "Batch":
        blocks = sequences * -(-length // BLOCK)
        layers = max(1, min(32, CACHED_BYTES // (sequences * length * TOKEN_BYTES)))
        shape = (blocks, layers, 2, KV_HEADS, BLOCK, DIM)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        tables = torch.randperm(blocks, device=device).int().view(sequences, -1)
        return Batch(cache, tables)

    @property
    def layers(self) -> int:
        return self.cache.shape[1]

    def pages(self, index: int) -> Pages:
        return Pages(self.cache, index % self.layers, self.tables)

    def contiguous(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [tokens, KV heads, D] of the one sequence."""
        record = self.cache[self.tables[0].long(), index % self.layers]
        keys, values = record.permute(1, 0, 3, 2, 4).reshape(2, -1, KV_HEADS, DIM)
        return keys.contiguous(), values.contiguous()


def ints(device: str, *lists: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.int64, device=device) for values in lists]


def prefill(report: Report, device: str) -> dict[str, Any]:
    """Time a chunk of one sequence: ours, torch's varlen kernel and SDPA on contiguous keys."""
    results = {}
    for count, before in PREFILLS:
        length = count + before
        batch = Batch.make(device, 1, length)
        query = torch.randn((count, HEADS, DIM), device=device).bfloat16()
        out = torch.empty_like(query)
        spans = Spans(*ints(device, [0], [count], [0], [length]), count)
        keys, values = batch.contiguous(0)
        kinds: dict[str, Callable[[int], Any]] = {
            "ours": lambda i, q=query, b=batch, s=spans, o=out: paged_attention(
                q, b.pages(i), s, o
            ),
            "varlen": lambda _, q=query, k=keys, v=values: varlen(q, k, v),
            "sdpa": lambda _, q=query, k=keys, v=values: sdpa(q, k, v),
        }
        flops = 4 * HEADS * DIM * count * (before + (count + 1) / 2)
        results[f"{count} new after {before}"] = compared(kinds, flops, out)
        del batch, keys, values
    return results


def compared(
    kinds: dict[str, Callable[[int], Any]], flops: float, out: torch.Tensor
) -> dict[str, Any]:
    """Time each kind; a yardstick that this torch does not have says why."""
    kinds["ours"](0)
    ours = out.float().clone()
    seconds = seconds_of_each(kinds.pop("ours"), 4)
    found: dict[str, Any] = {
        "ours": {"seconds": seconds, "tflop_s": round(flops / seconds / 1e12, 1)}
    }
    for name, work in kinds.items():
        try:
            seconds = seconds_of_each(work, 4)
            other = work(0)
        except (RuntimeError, TypeError, ImportError, ValueError) as error:
            found[name] = f"not measured: {error}"[:300]
            continue
        found[name] = {
            "seconds": seconds,
            "tflop_s": round(flops / seconds / 1e12, 1),
            "speed_of_ours": round(seconds / found["ours"]["seconds"], 3),
            "largest_difference": float((other.float() - ours).abs().max()),
        }
    return found


def varlen(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    count, length = query.shape[0], keys.shape[0]
    bounds = _bounds(query.device, count), _bounds(query.device, length)
    return varlen_attn(
        query, keys, values, *bounds, count, length, window_size=(-1, 0), enable_gqa=True
    )


_BOUNDS: dict[int, torch.Tensor] = {}


def _bounds(device: torch.device, length: int) -> torch.Tensor:
    # Kept: a graph under capture cannot copy from the host.
    if length not in _BOUNDS:
        _BOUNDS[length] = torch.tensor([0, length], dtype=torch.int32, device=device)
    return _BOUNDS[length]


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
    def make(device: str, sequences: int, length: int) -> "Decode":
        order = torch.arange(sequences, device=device)
        query = torch.randn((sequences, HEADS, DIM), device=device).bfloat16()
        return Decode(
            Batch.make(device, sequences, length),
            DecodeRows(order, order, torch.full_like(order, length)),
            query,
            torch.empty_like(query),
            Workspace(device),
        )

    def seconds(self, plan: SplitPlan, tuning: Tuning | None = None) -> float:
        def one(index: int) -> None:
            pages = self.batch.pages(index)
            paged_decode(
                self.query, pages, self.rows, self.out, plan, self.workspace, tuning=tuning
            )

        return seconds_of_each(one, max(2, self.batch.layers))


def decode(report: Report, device: str) -> dict[str, Any]:
    """Time single tokens against the time that their keys and values take to be read."""
    rate = bandwidth(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    results: dict[str, Any] = {"copy_gb_s": round(rate / 1e9, 1)}
    for sequences in BATCHES:
        for length in CONTEXTS:
            name, size = f"batch {sequences}, context {length}", sequences * length * TOKEN_BYTES
            if 2 * size > torch.cuda.mem_get_info(device)[0] or report.left() < 3 * RESERVE_S:
                results[name] = "no room or no time left"
                continue
            work = Decode.make(device, sequences, length)
            plans = {
                "balanced": SplitPlan.balanced(sequences, KV_HEADS, length, processors),
                "fixed": SplitPlan.fixed(512, length),
            }
            results[name] = {"bound_s": size / rate}
            for kind, plan in plans.items():
                seconds = work.seconds(plan)
                results[name][kind] = {
                    "splits": plan.count,
                    "seconds": seconds,
                    "of_bandwidth": round(size / rate / seconds, 3),
                }
            del work
    return results


def rows(report: Report, device: str) -> dict[str, Any]:
    """Time the kernels that move rows and blocks, in bytes a second, and sampling in seconds."""
    results: dict[str, Any] = {}
    for count in (64, 8192):
        residual = torch.randn((count, 4096), device=device)
        delta, weight = residual.bfloat16(), torch.ones(4096, device=device)
        out = torch.empty_like(delta)
        seconds = seconds_of_each(
            lambda _, r=residual, d=delta, w=weight, o=out: add_rms_norm(r, d, w, 1e-6, o), 20
        )
        moved = 2 * residual.nbytes + delta.nbytes + out.nbytes
        results[f"add_rms_norm of {count}"] = rated(seconds, moved)
    cache = torch.zeros((1024, 36, 2, KV_HEADS, BLOCK, DIM), dtype=torch.bfloat16, device=device)
    ids = torch.randperm(1024, device=device)[:256]
    staging = torch.empty_like(cache[:256])
    seconds = seconds_of_each(lambda _: gather_blocks(cache, ids, staging), 2)
    results["gather_blocks of 256"] = rated(seconds, 2 * staging.nbytes)
    for name, values in {
        "greedy": (0.0, 0, 1.0),
        "temperature": (1.0, 0, 1.0),
        "top_p": (1.0, 0, 0.9),
        "top_k and top_p": (1.0, 50, 0.9),
    }.items():
        results[f"sample 64, {name}"] = {"seconds": sampling(device, *values)}
    return results


def rated(seconds: float, moved: int) -> dict[str, float]:
    return {"seconds": seconds, "gb_s": round(moved / seconds / 1e9, 1)}


def sampling(device: str, temperature: float, top_k: int, top_p: float) -> float:
    count, vocab = 64, 151936
    logits = torch.randn((count, vocab), device=device) * 3
    order = torch.arange(count, device=device)

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    drawn = SamplingRows(
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(0.0, torch.float32),
        order,
        order,
    )
    tokens, finite = column(0, torch.int32), column(0, torch.bool)
    return seconds_of_each(lambda _: sample(logits, drawn, tokens, finite), 4)


def tunings(report: Report, device: str) -> dict[str, Any]:
    """Time other tiles than the chosen ones, as long as there is time: what to change next."""
    results: dict[str, Any] = {}
    work = Decode.make(device, 8, 8192)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    plan = SplitPlan.balanced(8, KV_HEADS, 8192, processors)
    batch = Batch.make(device, 1, 8192)
    query = torch.randn((8192, HEADS, DIM), device=device).bfloat16()
    out, spans = torch.empty_like(query), Spans(*ints(device, [0], [8192], [0], [8192]), 8192)
    for keys, warps, stages in ((32, 4, 4), (64, 4, 2), (128, 4, 2), (128, 8, 2), (64, 2, 3)):
        if report.left() > RESERVE_S:
            tuning = Tuning(rows=16, keys=keys, warps=warps, stages=stages)
            results[f"decode {tuning}"] = work.seconds(plan, tuning)
    for size, keys, warps, stages in ((128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)):
        if report.left() > RESERVE_S:
            tuning = Tuning(rows=size, keys=keys, warps=warps, stages=stages)
            results[f"prefill {tuning}"] = seconds_of_each(
                lambda i, t=tuning: paged_attention(query, batch.pages(i), spans, out, 0, t), 2
            )
    return results


PARTS = {"prefill": prefill, "decode": decode, "rows": rows, "tunings": tunings}
