"""`make exactness`: SmolLM2 at float32, a conversation whose KV moves, gets lost or is preempted.

    PYTHONPATH=tests/support python benchmarks/exactness.py --turns 100

What is compared, and within which bounds, is said in tests/support/exactness_runs.py. Writes
benchmarks/results/exactness.json. Anything outside the bounds raises and writes nothing.
"""

import argparse
import json
import time
from pathlib import Path

import exactness_runs as runs
from circumstances import circumstances
from tokenizers import Tokenizer

from agentserve.model.build import load_runner
from agentserve.model.prepare import prepare

TIER = 320 << 20  # bytes of each tier: room for the whole conversation
CHANCE = 0.04  # of a preemption, each step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=100, help="turns (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of lines, lengths and losses")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/exactness.json"))
    options = parser.parse_args()
    head = circumstances("exactness")
    directory = prepare("smollm2-135m")
    tiers = {"kv_bytes": TIER, "host_bytes": TIER}
    runner = load_runner({"directory": str(directory), "dtype": "float32", **tiers})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    turns, seed = runs.script(tokenizer, options.turns, options.seed), options.seed
    started, found = time.monotonic(), {}

    def note(name: str, result: dict) -> None:
        found[name] = result
        print(f"{name}: {result}", flush=True)

    forks = runs.untouched(runner, turns, forks=True)
    note("a_forked_and_restored", runs.compare_moved(
        forks, runs.offloaded(runner, turns, forks=True)
    ))  # fmt: skip
    del forks
    reference = runs.untouched(runner, turns)
    note("a_offloaded", runs.compare_moved(reference, runs.offloaded(runner, turns)))
    outputs = reference.outputs
    note("b_host_lost", runs.compare_recomputed(
        reference, runs.with_losses(runner, turns, seed, outputs)
    ))  # fmt: skip
    note("b_preempted", runs.compare_recomputed(
        reference, runs.preempted(runner, turns, seed, outputs, CHANCE)
    ))  # fmt: skip
    note("b_preempted_and_demoted", runs.compare_demoted(
        reference, runs.demoted(runner, turns, seed, outputs)
    ))  # fmt: skip
    result = {
        **head,
        "model": "smollm2-135m",
        "dtype": "float32",
        "seed": seed,
        "turns": options.turns,
        "context_tokens": max(reference.logits),
        "bounds": {"logits": runs.WITHIN, "margin": runs.CLEAR},
        "seconds": round(time.monotonic() - started),
        **found,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"all within the bounds; written to {options.json}")


if __name__ == "__main__":
    main()
