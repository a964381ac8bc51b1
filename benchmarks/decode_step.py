"""Decode step time and prefill rate of the CPU runner on random KV, with the bandwidth floor.

    python benchmarks/decode_step.py [--model smollm2-135m] [--dtype auto] [--json out.json]

The floor of a step is its weight bytes and KV bytes over the memory rate measured in the same run.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from circumstances import circumstances
from floor_rates import memory_rate

from agentserve.config import ModelSettings
from agentserve.engine.plan import (
    Row,
    SamplingParams,
    SlotAdd,
    SlotDrop,
    StepPlan,
    TableAppend,
    pack,
)
from agentserve.model.build import load_runner
from agentserve.model.prepare import prepare

if TYPE_CHECKING:
    from agentserve.model.runner import TorchRunner


CASES = ((1, 512), (1, 4096), (1, 8000), (8, 2048))  # sessions, tokens of each


def fill_cache(runner: "TorchRunner") -> None:
    """Write to the KV that the steps read: unwritten memory is one page, in the core's cache."""
    needed = max(batch * -(-context // runner.info.block_size) for batch, context in CASES)
    runner._decoder.cache[:needed].normal_()


def timed_step(runner: "TorchRunner", step: int, rows: list[Row], **changes: Any) -> float:
    plan = {"dropped": [], "added": [], "appended": [], "copies": []} | changes
    tokens = np.arange(sum(row.count for row in rows)) % runner.info.vocab_size
    plan = StepPlan(step=step, rows=rows, tokens=pack(tokens.tolist()), **plan)
    start = time.perf_counter()
    handle = runner.launch(plan)
    runner.sample(handle, {})
    runner.collect(handle)
    return time.perf_counter() - start


def open_slots(runner: "TorchRunner", count: int, tokens: int) -> dict[str, Any]:
    blocks = -(-tokens // runner.info.block_size)
    return {
        "added": [SlotAdd(slot, 1, SamplingParams(), 0) for slot in range(count)],
        "appended": [
            TableAppend(slot, 0, list(range(slot * blocks, (slot + 1) * blocks)))
            for slot in range(count)
        ],
    }


def decode_ms(runner: "TorchRunner", batch: int, context: int, steps: int) -> float:
    rows = [Row(slot, context - 1, 1, sample=True) for slot in range(batch)]
    timed_step(runner, 0, rows, **open_slots(runner, batch, context))
    seconds = [timed_step(runner, n + 1, rows) for n in range(steps)]
    timed_step(runner, 0, [], dropped=[SlotDrop(slot, 1) for slot in range(batch)])
    return statistics.median(seconds) * 1e3


def prefill_rate(runner: "TorchRunner", count: int, context: int, repeats: int = 5) -> float:
    rows = [Row(0, context, count, sample=True)]
    timed_step(runner, 0, rows, **open_slots(runner, 1, context + count))
    seconds = [timed_step(runner, n + 1, rows) for n in range(repeats)]
    timed_step(runner, 0, [], dropped=[SlotDrop(0, 1)])
    return count / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    head = circumstances("decode_step")
    settings = ModelSettings(
        directory=str(prepare(args.model)), dtype=args.dtype, block_size=args.block_size
    )
    runner = load_runner(msgspec.to_builtins(settings))
    fill_cache(runner)
    rate, info = memory_rate(), runner.info
    token_bytes = info.groups[0].block_bytes / info.block_size
    print(f"{info.dtype}, {info.block_size}-token blocks, memory {rate / 1e9:.1f} GB/s")
    results = {
        "measured": head,
        "dtype": info.dtype,
        "memory_bytes_per_s": rate,
        "decode": [],
        "prefill": [],
    }
    for batch, context in CASES:
        floor = (info.weight_bytes + batch * context * token_bytes) / rate * 1e3
        ms = decode_ms(runner, batch, context, args.steps)
        row = {"batch": batch, "context": context, "ms": ms, "floor_ms": floor}
        results["decode"].append(row)
        print(f"decode  {batch} x {context:5}: {ms:6.1f} ms, {ms / floor:.2f} x floor {floor:.1f}")
    for count, context in ((55, 512), (55, 4096), (512, 0), (512, 4096)):
        tokens_per_s = prefill_rate(runner, count, context)
        results["prefill"].append({"new": count, "cached": context, "tokens_per_s": tokens_per_s})
        print(f"prefill {count:3} after {context:4}: {tokens_per_s:6.0f} tokens/s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
