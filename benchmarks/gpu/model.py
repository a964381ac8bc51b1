"""Section `model`: steps of a model of 8 billion parameters against what the device allows.

Decode against the time that its weights and KV take to be read, prefill against the rate of matrix
products, each step with all that the host does for it, and decode without CUDA graphs beside it.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch

from agentserve.engine.plan import (
    SAMPLED,
    Row,
    SamplingParams,
    SlotAdd,
    SlotDrop,
    StepPlan,
    TableAppend,
    pack,
)
from agentserve.model.decoder import Decoder, block_bytes
from agentserve.model.gpu_runner import GpuRunner
from benchmarks.gpu.play import make_runner, random_decoder, random_tokens
from benchmarks.gpu.report import Report
from benchmarks.gpu.sizes import BLOCK_TOKENS, GPU_MODEL, TINY_MODEL, Measured
from benchmarks.gpu.timing import middle, seconds_of, synchronize

SPARE_BYTES = 8 << 30  # of the free memory: what is not weights and KV
RESERVE_S = 2.0
REPEATS = 3
# Dense bfloat16 and memory, by a part of the device's name: from NVIDIA's data sheets.
PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.04e12)}


def run(report: Report, options: argparse.Namespace) -> None:
    """Run the parts on one decoder."""
    sizes, device = (TINY_MODEL if options.tiny else GPU_MODEL), options.device
    report.part("rates", lambda: rates(sizes, device))
    made: list[Decoder] = []
    report.part("load", lambda: made.append(load(sizes, device)) or facts(made[0]))
    if not made:
        return
    runner = make_runner(made[0], max(sizes.batches))
    found = report.values.get("rates", {})
    report.part("graphs", lambda: graphs(report, made[0], runner, sizes))
    report.part("decode", lambda: decode(report, runner, sizes, found))
    report.part("prefill", lambda: prefill(report, runner, sizes, found))


def rates(sizes: Measured, device: str) -> dict[str, float]:
    """Return the device's own rates: bytes of a copy, read and written, and products, a second."""
    size = (1 << 30) if device != "cpu" else (1 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    sides = torch.randn(2, sizes.product, sizes.product, device=device).to(sizes.dtype)
    out = torch.empty_like(sides[0])

    def copies() -> None:
        for _ in range(8):
            target.copy_(source)

    def products() -> None:
        for _ in range(8):
            torch.mm(sides[0], sides[1], out=out)

    def rate(work: Any, amount: float) -> float:
        work()
        return amount / middle(seconds_of(device, work) for _ in range(REPEATS))

    found = {
        "bytes_s": rate(copies, 16.0 * size),
        "flop_s": rate(products, 16.0 * sizes.product**3),
    }
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        peaks = [peak for part, peak in PEAKS.items() if part in name]
        found |= {"peak_flop_s": peaks[0][0], "peak_bytes_s": peaks[0][1]} if peaks else {}
    return found


def load(sizes: Measured, device: str) -> Decoder:
    """Return the decoder, its KV pool as large as it may be and the device has room for."""
    record = block_bytes(sizes.model, BLOCK_TOKENS, sizes.dtype)
    room = sizes.kv_bytes
    if device != "cpu":
        weights = 2 * parameters(sizes) + 4 * sizes.model.vocab_size * sizes.model.hidden_size
        room = min(room, torch.cuda.mem_get_info(device)[0] - weights - SPARE_BYTES)
    return random_decoder(sizes.model, device, sizes.dtype, max(16, room // record))


def facts(decoder: Decoder) -> dict[str, int]:
    return {
        "weight_bytes": decoder.weight_bytes,
        "kv_blocks": decoder.cache.shape[0],
        "kv_token_bytes": decoder.cache[0].nbytes // BLOCK_TOKENS,
    }


def parameters(sizes: Measured) -> int:
    """Return the numbers in the matrices of all layers."""
    model = sizes.model
    heads = 2 * model.heads + 2 * model.kv_heads
    return model.layers * model.hidden_size * (heads * model.head_dim + 3 * model.inner_size)


class Slots:
    """Sequences whose KV is whatever lies in random blocks of the pool.

    Sequences share blocks where the pool is smaller than all of them. Each reads them in another
    order, so that a block is not in a cache when the next one reads it.
    """

    def __init__(self, runner: GpuRunner, count: int, tokens: int, context: int) -> None:
        self.runner = runner
        self.count = count
        self._step = 0
        info, length = runner.info, -(-tokens // BLOCK_TOKENS)
        random = np.random.default_rng(context)
        blocks = random.integers(0, info.num_blocks, (count, length))
        if count * length <= info.num_blocks:
            blocks = random.permutation(info.num_blocks)[: count * length].reshape(count, length)
        added = [SlotAdd(slot, 0, SamplingParams(), 0) for slot in range(count)]
        tables = [TableAppend(slot, 0, row) for slot, row in enumerate(blocks.tolist())]
        self._plan(added=added, appended=tables)

    def close(self) -> None:
        self._plan(dropped=[SlotDrop(slot, 0) for slot in range(self.count)])

    def decode(self, context: int, steps: int) -> list[float]:
        """Return the seconds between the results of steps, launched one ahead as an engine does."""
        ends: list[float] = []
        flying = None
        for step in range(steps):
            tokens = pack([SAMPLED if step else 1] * self.count)
            rows = [Row(slot, context + step, 1, True) for slot in range(self.count)]
            handle = self._launch(rows=rows, tokens=tokens)
            if flying is not None:
                self.runner.collect(flying)
                ends.append(time.perf_counter())
            self.runner.sample(handle, {})
            flying = handle
        result = self.runner.collect(flying)
        ends.append(time.perf_counter())
        if not all(result.finite):
            raise ValueError("logits are not finite")
        return np.diff(ends).tolist()

    def prefill(self, start: int, tokens: list[int]) -> None:
        self._plan(rows=[Row(0, start, len(tokens), True)], tokens=pack(tokens))

    def _launch(self, **changes: Any) -> Any:
        nothing: dict[str, Any] = dict.fromkeys(("dropped", "added", "appended", "rows"), ())
        fields = nothing | {"copies": [], "tokens": b""} | changes
        self._step += 1
        return self.runner.launch(StepPlan(step=self._step, **fields))

    def _plan(self, **changes: Any) -> None:
        handle = self._launch(**changes)
        self.runner.sample(handle, {})
        self.runner.collect(handle)


def decode_step(runner: GpuRunner, sizes: Measured, batch: int, context: int) -> float:
    """Return the median seconds of a decode step of `batch` sequences."""
    count = sizes.steps + 3
    slots = Slots(runner, batch, context + count, context)
    seconds = slots.decode(context, count)
    slots.close()
    return middle(seconds[2:])  # the first ones wait for what was before


def decode(
    report: Report, runner: GpuRunner, sizes: Measured, found: dict[str, float]
) -> dict[str, Any]:
    """Time decode steps against the bytes that each must read, at the rate of a copy."""
    info, rows = runner.info, {}
    token_bytes = info.groups[0].block_bytes // BLOCK_TOKENS
    for batch in sizes.batches:
        for context in sizes.contexts:
            name = f"batch {batch}, context {context}"
            if report.left() < RESERVE_S:
                rows[name] = "no time left"
                continue
            moved = info.weight_bytes + batch * context * token_bytes
            seconds = decode_step(runner, sizes, batch, context)
            rows[name] = {
                "seconds": seconds,
                "bound_s": moved / found["bytes_s"],
                "of_bandwidth": round(moved / found["bytes_s"] / seconds, 3),
            }
            if "peak_bytes_s" in found:
                rows[name]["of_peak"] = round(moved / found["peak_bytes_s"] / seconds, 3)
            report.put(decode=rows)
    return rows


def graphs(
    report: Report, decoder: Decoder, captured: GpuRunner, sizes: Measured
) -> dict[str, Any]:
    """Time decode steps with graphs and without, in turn."""
    plain = make_runner(decoder, max(sizes.batches), graphs=False)
    rows = {}
    for batch in sizes.batches:
        if report.left() < RESERVE_S:
            break
        on, off = [], []
        for _ in range(2):
            on.append(decode_step(captured, sizes, batch, sizes.contexts[0]))
            off.append(decode_step(plain, sizes, batch, sizes.contexts[0]))
        rows[f"batch {batch}"] = {
            "on_s": min(on),
            "off_s": min(off),
            "speedup": round(min(off) / min(on), 3),
        }
    return rows


def prefill(
    report: Report, runner: GpuRunner, sizes: Measured, found: dict[str, float]
) -> dict[str, Any]:
    """Time chunks of one sequence against the rate of matrix products: model FLOPs utilisation."""
    model, rows, device = sizes.model, {}, runner.info.device
    for count, before in sizes.prefills:
        name = f"{count} new after {before}"
        if report.left() < RESERVE_S:
            rows[name] = "no time left"
            continue
        pairs = count * (before + (count + 1) / 2)
        flops = 2.0 * parameters(sizes) * count
        flops += 2.0 * model.vocab_size * model.hidden_size  # one row has logits
        flops += 4.0 * model.layers * model.heads * model.head_dim * pairs
        slots = Slots(runner, 1, before + count, before)
        tokens = random_tokens(model, count, seed=before)
        synchronize(device)
        times = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            slots.prefill(before, tokens)
            times.append(time.perf_counter() - start)
        slots.close()
        seconds = middle(times[1:])  # the first one may compile
        rows[name] = {
            "seconds": seconds,
            "tokens_s": round(count / seconds, 1),
            "of_measured_products": round(flops / seconds / found["flop_s"], 3),
        }
        if "peak_flop_s" in found:
            rows[name]["mfu"] = round(flops / seconds / found["peak_flop_s"], 3)
        report.put(prefill=rows)
    return rows
