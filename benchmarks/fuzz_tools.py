"""`make fuzz-tools`: mutated outputs of every family, read whole and in random pieces.

    PYTHONPATH=benchmarks:tests/support python benchmarks/fuzz_tools.py [--outputs 100000]

Each output is what a model of one family might say, with up to six things wrong. Checked are: no
exception, the same items however the text is cut, events that tell the items, arguments that the
deltas add up to, and characters looked at in proportion to the text. Written to
benchmarks/results/fuzz_tools.json, with every output that failed; exits with 1 if one did.
"""

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import tool_call_fuzz
from circumstances import ROOT, circumstances

RESULT = ROOT / "benchmarks/results/fuzz_tools.json"
PART = 1_000


def run_part(seed: str, first: int, count: int) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Check some outputs; return what was read, and what failed."""
    seen: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    for number in range(first, first + count):
        try:
            format, kinds = tool_call_fuzz.check(seed, number)
            seen.update([format, *kinds])
        except Exception as error:
            failed.append({"number": number, "error": f"{type(error).__name__}: {error}"[:2000]})
    return seen, failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--outputs", type=int, default=100_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    head = circumstances("fuzz_tools")
    seen: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    began = time.monotonic()
    starts = range(0, options.outputs, PART)
    sizes = [min(PART, options.outputs - start) for start in starts]
    with ProcessPoolExecutor(options.jobs) as pool:
        for counts, failures in pool.map(partial(run_part, options.seed), starts, sizes):
            seen.update(counts)
            failed += failures
    result = {
        **head,
        "seed": options.seed,
        "outputs": options.outputs,
        "failed": failed,
        "families": {name: seen[name] for name in tool_call_fuzz.NAMES},
        "items": {kind: seen[kind] for kind in tool_call_fuzz.KINDS},
        "seconds": round(time.monotonic() - began, 1),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.outputs} outputs, {len(failed)} failed, {result['seconds']} s: {RESULT}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
