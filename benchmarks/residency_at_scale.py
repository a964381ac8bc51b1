"""What the host tier gives on one H200, simulated: agents that call tools, an 8B model.

    make bench-scale            # or: python benchmarks/residency_at_scale.py [--help]

The engine, its scheduler, KV cache and policies are the real ones; the runner computes only how
long each step and copy would take, and virtual time passes. The agents' sizes and waits are those
of real Claude Code conversations, read from ../shared/traces. This is a cost model, not a
measurement on a device.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scale_workload
from circumstances import ROOT, circumstances
from scale_loop import SETTLE_S, START_S, Cell, Measured, Simulation
from scale_workload import Conversation

TRACES = ROOT.parent / "shared/traces/workload/weka_claude_code_traces.jsonl.gz"
SIMULATED = "simulated: a cost model, not a device measurement"
HOSTS = (0.0, 100e9, 200e9, 1e12)
MAX_CONTEXT, MAX_WAIT_S = 200_000, 300.0
ASSUMPTIONS = [
    "16.1 GB of weights, 128 KiB of KV a token, 0.55 x 989 TFLOPS, 0.8 x 4.8 TB/s, 0.5 ms a step",
    "8192 tokens a step; host link 50 GB/s each way, both ways at once, free for the GPU",
    "device KV of 830,000 tokens in blocks of 256; whole blocks are copied",
    f"real conversations of at most {MAX_CONTEXT:,} tokens; each request keeps, adds and generates "
    f"what was logged, after the logged wait of its client, cut to {MAX_WAIT_S:.0f} s",
    "closed loop: an agent whose conversation ends begins another at once; the first is met in its "
    "middle; nothing is shared between conversations; sub-agents are left out",
    "the logs name no tools, so tool-aware learns one duration for all tools and one for people",
    "no tokenising, no network; the engine's own time is not counted",
]


def cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """Yield each cell with the name of its memory."""
    for sessions in args.sessions:
        for host in HOSTS:
            for policy in ("device-lru", "tool-aware") if not host else ("lru+host", "tool-aware"):
                yield name(host), cell(args, policy, sessions, host)
        unlimited = sessions * (MAX_CONTEXT + 50_000)
        yield "unlimited device", cell(args, "device-lru", sessions, 0.0, device_tokens=unlimited)


def cell(args: argparse.Namespace, policy: str, sessions: int, host: float, **changes: Any) -> Cell:
    return Cell(policy, sessions, host, seed=0, window_s=args.window, **changes)


def name(host_bytes: float) -> str:
    if not host_bytes:
        return "no host"
    return f"{host_bytes / 1e9:.0f} GB" if host_bytes < 1e12 else f"{host_bytes / 1e12:.0f} TB"


def quantile(values: list[float], share: float) -> float:
    """Return the nearest-rank quantile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def figures(measured: Measured, window_s: float) -> dict[str, float]:
    """Return what is reported of one run."""
    return {
        "tokens_per_s": measured.output_tokens / window_s,
        "ttft_p50_s": quantile(measured.ttft_s, 0.5),
        "ttft_p95_s": quantile(measured.ttft_s, 0.95),
        "turn_p50_s": quantile(measured.turn_s, 0.5),
        "longest_wait_s": measured.longest_wait_s,
        "turns": measured.turns,
        "new_tokens": measured.new_tokens,
        "recomputed_tokens": measured.recomputed_tokens,
        "saved_gb": measured.saved_bytes / 1e9,
        "loaded_gb": measured.loaded_bytes / 1e9,
        "preemptions": measured.preemptions,
        "busy": measured.busy_s / window_s,
    }


def run(memory: str, cell: Cell, seeds: list[int], data: list[Conversation]) -> dict[str, Any]:
    """Run a cell with each seed; return medians over the seeds, and the spread of tokens/s."""
    runs = []
    for seed in seeds:
        changed = {k: getattr(cell, k) for k in Cell.__slots__} | {"seed": seed}
        runs.append(figures(Simulation(Cell(**changed), data).run(), cell.window_s))
    median = {key: round(statistics.median(r[key] for r in runs), 3) for key in runs[0]}
    rates = sorted(r["tokens_per_s"] for r in runs)
    return {
        "sessions": cell.sessions,
        "memory": memory,
        "policy": cell.policy,
        **median,
        "tokens_per_s_range": [round(rates[0], 1), round(rates[-1], 1)],
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    low, high = row["tokens_per_s_range"]
    return (
        f"| {row['sessions']:3} | {row['memory']:16} | {row['policy']:10} "
        f"| {row['tokens_per_s']:5.0f} ({low:.0f}-{high:.0f}) | {row['ttft_p50_s']:7.2f} "
        f"| {row['ttft_p95_s']:7.2f} | {row['longest_wait_s']:6.0f} "
        f"| {row['recomputed_tokens'] / 1e6:6.2f} | {row['new_tokens'] / 1e6:5.2f} |"
    )


HEADER = (
    "| N   | KV memory        | policy     | output tokens/s | TTFT p50 s | p95 s | longest wait s "
    "| recomputed M | new M |\n|---|---|---|---|---|---|---|---|---|"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--sessions", type=int, nargs="+", default=[16, 24, 32, 48, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--window", type=float, default=600.0, help="virtual seconds measured")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if not args.traces.exists():
        sys.exit(f"{args.traces} is not here: without the real workload there is nothing to run")
    data = scale_workload.load(args.traces, MAX_CONTEXT, MAX_WAIT_S)
    workload = f"{len(data)} conversations, {sum(map(len, data))} requests"
    started, cpu_started = time.perf_counter(), time.process_time()
    print(f"{SIMULATED}\n{workload}\n\n{HEADER}")
    results: dict[str, Any] = {
        "what": SIMULATED,
        "measured": {
            **circumstances("residency_at_scale"),
            "seeds": args.seeds,
            "warmup_s": f"{START_S:.0f} for each session, and {SETTLE_S:.0f}",
            "window_s": args.window,
        },
        "assumptions": ASSUMPTIONS,
        "workload": f"callanjfox/kv-cache-tester (Apache-2.0), sampled: {workload}",
        "rows": [],
    }
    for memory, each in cells(args):
        results["rows"].append(run(memory, each, args.seeds, data))
        print(line(results["rows"][-1]), flush=True)
        results["measured"]["wall_s"] = round(time.perf_counter() - started)
        results["measured"]["cpu_s"] = round(time.process_time() - cpu_started)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{SIMULATED}; {time.perf_counter() - started:.0f} s of wall time")


if __name__ == "__main__":
    main()
