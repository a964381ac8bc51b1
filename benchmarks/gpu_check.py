"""Everything that needs a GPU, measured in one run of six minutes at most, on a bare machine.

    python benchmarks/gpu_check.py [--out gpu_check.json] [--section NAME] [--device cpu --tiny]

Needs torch, triton, numpy, transformers, safetensors and msgspec; weights are random. Each section
runs in a process of its own under a time limit; one that overruns, raises or crashes is recorded
with what it had measured, and the next one runs. The JSON is written after each.
`--device cpu --tiny` runs the same code with small sizes where there is no GPU; its times mean
nothing.
"""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu.summary import summary

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 360.0
CPU_SLACK = 5  # times as long for all: the interpreter's times mean nothing
MARGIN_S = 10.0  # a section ends by itself so long before it would be killed


@dataclass(frozen=True)
class Section:
    """A module with `run(report, options)`; its process is killed after `limit_s`."""

    module: str
    limit_s: float


# The limits of all sections are no more than TOTAL_S.
SECTIONS = {
    "environment": Section("benchmarks.gpu.environment", 25),
    "correctness": Section("benchmarks.gpu.correctness", 60),
    "model": Section("benchmarks.gpu.model", 75),
    "batching": Section("benchmarks.gpu.batching", 70),
    "kernels": Section("benchmarks.gpu.kernels", 50),
    "residency": Section("benchmarks.gpu.residency", 80),
}


def main() -> None:
    options = parse()
    if options.in_process:
        run_here(options)
        return
    names = options.section or list(SECTIONS)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": options.device,
        "tiny": options.tiny,
        "sections": {},
    }
    slack = CPU_SLACK if options.device == "cpu" else 1
    deadline = time.monotonic() + slack * TOTAL_S
    for name in names:
        print(f"{name} ...", flush=True)
        limit_s = slack * SECTIONS[name].limit_s
        limit_s = min(limit_s, options.limit_s, deadline - time.monotonic())
        section = result["sections"][name] = run_section(name, limit_s, options)
        result["summary"] = summary(result["sections"])
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(section, indent=2), flush=True)
    bad = [name for name, section in result["sections"].items() if section["status"] != "passed"]
    print(f"{options.out}: " + (f"not passed: {', '.join(bad)}" if bad else "all passed"))
    sys.exit(1 if bad else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small sizes: for a CPU")
    parser.add_argument("--in-process", action="store_true", help="one section, here, unbounded")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="at most, for a section")
    options = parser.parse_args()
    if options.device == "cuda":
        options.device = "cuda:0"  # torch's set_device wants a number
    if options.in_process and len(options.section or ()) != 1:
        parser.error("--in-process takes one --section")
    return options


def run_section(name: str, limit_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run a section in its own process; return what it reported, its status and its seconds."""
    with tempfile.TemporaryDirectory() as directory:
        part = Path(directory) / "part.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--in-process"]
        command += ["--section", name, "--out", str(part), "--device", options.device]
        command += ["--limit-s", str(limit_s)] + ["--tiny"] * options.tiny
        start = time.monotonic()
        try:
            ended = subprocess.run(
                command,
                timeout=max(limit_s, 0.1),
                env=environment(options.device),
                check=False,
                text=True,
                stderr=subprocess.PIPE,
            )
            status = "passed" if ended.returncode == 0 else "failed"
            error = ended.stderr[-4000:]  # warnings too
        except subprocess.TimeoutExpired:
            status, error = "timed out", ""
        reported = json.loads(part.read_text()) if part.exists() else {}
        seconds = round(time.monotonic() - start, 2)
    head = {"status": status, "seconds": seconds, "limit_s": round(limit_s, 1)}
    return head | ({"stderr": error} if error else {}) | reported


def environment(device: str) -> dict[str, str]:
    # One workspace of a fixed size: the same product gives the same bits beside other streams.
    changes = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if device == "cpu":
        changes |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | changes


def run_here(options: argparse.Namespace) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    from benchmarks.gpu.report import Report

    report = Report(options.out, options.limit_s - MARGIN_S)
    try:
        section = importlib.import_module(SECTIONS[options.section[0]].module)
        section.run(report, options)
    except Exception:
        report.problem("section", traceback.format_exc())
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
