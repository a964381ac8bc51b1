"""`make record-sim SEEDS=100000`: the seeded simulation of the engine, its counts written down.

    python benchmarks/simulation.py --seeds 100000 [--jobs 2]

All seeds run on the oracle, and a tenth of them on the simulated device. After each part of 5,000
the counts so far go to benchmarks/results/simulation.json. A seed that fails is listed there, with
its world and the command that replays it; the others run all the same. Exits with 1 if one failed.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from circumstances import ROOT, circumstances

from agentserve.engine.sim import CHUNK, Simulation, run_seeds
from agentserve.engine.simrunner import DeviceSimulation

RESULT = ROOT / "benchmarks/results/simulation.json"
PART = 5_000  # seeds between two writes
SIMULATIONS = {"oracle": (Simulation, 1), "simulated device": (DeviceSimulation, 10)}

Failure = dict[str, Any]


def run_each(seeds: range, make: type[Simulation]) -> "tuple[Counter[str], list[Failure]]":
    """Run every seed, whatever the others do; return what happened in those that passed."""
    counts: Counter[str] = Counter()
    failed: list[Failure] = []
    for seed in seeds:
        try:
            counts.update(run_seeds(seed, 1, make))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            notes = getattr(error, "__notes__", [])  # the world, and how to replay it
            failed.append({"seed": seed, "error": said, "note": "; ".join(notes)})
    return counts, failed


def run_part(
    seeds: range, make: type[Simulation], pool: ProcessPoolExecutor
) -> "tuple[Counter[str], list[Failure]]":
    """Run a part in the processes of `pool`."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    counts: Counter[str] = Counter()
    failed: list[Failure] = []
    for some, of_them in pool.map(partial(run_each, make=make), chunks):
        counts.update(some)
        failed += of_them
    return counts, failed


def run(
    make: type[Simulation], seeds: range, pool: ProcessPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Run one simulation; yield what it gave so far after each part."""
    total: Counter[str] = Counter()
    row: dict[str, Any] = {"command": make.command, "failed": [], "parts": []}
    for at in range(0, len(seeds), PART):
        part, began = seeds[at : at + PART], time.monotonic()
        counts, failed = run_part(part, make, pool)
        total.update(counts)
        seconds = round(time.monotonic() - began)
        row["failed"] += failed
        row["parts"].append({"start": part.start, "seeds": len(part), "seconds": seconds})
        row["counts"] = dict(sorted(total.items()))
        print(f"{make.command}: to seed {part.stop - 1}, {seconds} s, {len(failed)} failed")
        for failure in failed:
            print(f"  {failure['error']}; {failure['note']}")
        sys.stdout.flush()
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--start", type=int, default=0, help="the first (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, default=RESULT, help="where the result goes")
    options = parser.parse_args()
    result = circumstances("simulation") | {"complete": False, "failed": 0, "simulations": {}}
    rows = result["simulations"]
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, (make, divisor) in SIMULATIONS.items():
            seeds = range(options.start, options.start + options.seeds // divisor)
            for rows[name] in run(make, seeds, pool):
                result["failed"] = sum(len(row["failed"]) for row in rows.values())
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    result["complete"] = True
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['failed']} seeds failed; written to {options.json}")
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
