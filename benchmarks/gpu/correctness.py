"""Section `correctness`: the kernels, the forward pass and the runner against their references."""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
SCRIPTS = {"kernels": "gpu_cases.py", "model": "gpu_model_cases.py"}
PROCESSES = min(12, len(os.sched_getaffinity(0)))  # a case's time on a GPU is the compiler's
TINY = {
    "kernels": (
        "silu_mul_equals_its_reference",
        "kv_write_equals_its_reference",
        "single_tokens_with_a_window_equal_their_reference",
        "greedy_takes_the_first_of_the_highest",
    ),
    "model": ("long_contexts_are_divided_and_give_the_same_logits",),
}


def run(report: Report, options: argparse.Namespace) -> None:
    """Run all cases; on a CPU a few of them, in triton's interpreter."""
    for name, script in SCRIPTS.items():
        shares = [("--share", str(i), str(PROCESSES)) for i in range(PROCESSES)]
        runs = [TINY[name]] if options.device == "cpu" else shares
        report.part(name, lambda script=script, runs=runs: outcomes(script, runs))


def outcomes(script: str, runs: list[tuple[str, ...]]) -> dict[str, str]:
    """Return what became of each case; raises AssertionError if one has failed.

    In processes of their own: an illegal access would be the end of this one's device.
    """
    paths = [str(path) for path in (SUPPORT, ROOT, ROOT / "kernels")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def one(arguments: tuple[str, ...]) -> dict[str, str]:
        ended = subprocess.run(
            [sys.executable, str(SUPPORT / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            return {" ".join(arguments): ended.stderr[-2000:]}
        return json.loads(ended.stdout)

    with ThreadPoolExecutor(PROCESSES) as pool:
        found = {name: text for part in pool.map(one, runs) for name, text in part.items()}
    failed = {name: text for name, text in found.items() if text != "passed"}
    assert not failed, json.dumps(failed, indent=2)
    return found
