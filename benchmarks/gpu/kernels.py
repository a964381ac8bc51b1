"""Section `kernels`: our Triton kernels, each against its reference, and how fast they are."""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
PROCESSES = min(8, len(os.sched_getaffinity(0)))  # a case's time on a GPU is the compiler's
TINY = (
    "silu_mul_equals_its_reference",
    "kv_write_equals_its_reference",
    "single_tokens_with_a_window_equal_their_reference",
    "greedy_takes_the_first_of_the_highest",
)


def run(report: Report, options: argparse.Namespace) -> None:
    """Run the parts; on a CPU a few of the cases, in triton's interpreter, and no times."""
    if options.device == "cpu":
        report.put(note="a few cases in triton's interpreter, where times mean nothing")
        changes = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        report.part("correctness", lambda: correctness([TINY], changes))
        return
    shares = [("--share", str(i), str(PROCESSES)) for i in range(PROCESSES)]
    report.part("correctness", lambda: correctness(shares, {}))
    from benchmarks.gpu.kernel_times import PARTS

    def measure(work: Callable[[Report, str], Any]) -> Any:
        torch.cuda.set_device(options.device)  # triton runs on the current one
        return work(report, options.device)

    for name, work in PARTS.items():
        report.part(name, lambda work=work: measure(work))
        gc.collect()
        torch.cuda.empty_cache()


def correctness(runs: list[tuple[str, ...]], changes: dict[str, str]) -> dict[str, str]:
    """Return what became of each case; raises AssertionError if one has failed.

    In processes of their own: an illegal access would be the end of this one's device.
    """
    paths = [str(SUPPORT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | changes | {"PYTHONPATH": os.pathsep.join(paths)}

    def one(arguments: tuple[str, ...]) -> dict[str, str]:
        ended = subprocess.run(
            [sys.executable, str(SUPPORT / "gpu_cases.py"), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            return {" ".join(arguments): ended.stderr[-2000:]}
        return json.loads(ended.stdout)

    with ThreadPoolExecutor(PROCESSES) as pool:
        outcomes = {name: text for part in pool.map(one, runs) for name, text in part.items()}
    failed = {name: text for name, text in outcomes.items() if text != "passed"}
    assert not failed, json.dumps(failed, indent=2)
    return outcomes
