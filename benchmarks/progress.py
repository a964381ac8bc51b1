"""`make progress`: small worlds to a greater depth, and many random overloads; see small_worlds.py.

    PYTHONPATH=tests/support python benchmarks/progress.py --depth 10

Writes what was visited to benchmarks/results/progress.json. A failure raises and writes nothing.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path

from circumstances import circumstances
from small_worlds import explore, overload

HOSTS = (0, 2, 4)  # blocks of the host tier, beside 4 on the device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=9, help="moves from the start (default 9)")
    parser.add_argument("--overloads", type=int, default=10_000, help="seeds (default 10000)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/progress.json"))
    options = parser.parse_args()
    head = circumstances("progress")
    started, worlds = time.monotonic(), []
    for host, ahead in product(HOSTS, (0, 1)):
        counts = explore(host, options.depth, ahead)
        world = {"device_blocks": 4, "host_blocks": host, "sessions": 2, "runner_depth": ahead}
        worlds.append(world | counts)
        states, moves = counts["states"], counts["moves"]
        print(f"host {host}, runner of depth {ahead}: {states} states, {moves} moves", flush=True)
    turns = 0
    for seed in range(options.overloads):
        turns += overload(seed)
        if (seed + 1) % 1000 == 0:
            print(f"{seed + 1} overloads, {turns} turns", flush=True)
    result = {
        **head,
        "depth": options.depth,
        "worlds": worlds,
        "states": sum(world["states"] for world in worlds),
        "overloads": {"seeds": options.overloads, "turns": turns},
        "violations": 0,
        "seconds": round(time.monotonic() - started),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"every turn ended, no invariant broken; written to {options.json}")


if __name__ == "__main__":
    main()
