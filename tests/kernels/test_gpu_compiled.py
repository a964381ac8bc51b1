"""What the GPU kernels compile to: a few here and now, all of them in the committed report."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "compiled.py"
REPORT = ROOT / "benchmarks" / "results" / "gpu_kernels.json"


def test_kernels_of_an_8b_model_compile_for_an_h100_without_spills(tmp_path):
    out = tmp_path / "out.json"
    ended = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            f"--out={out}",
            "--target=sm_90",
            "--only=heads of 128, bf16",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    kernels = json.loads(out.read_text())["kernels"]
    assert {kernel["kernel"] for kernel in kernels} == {
        "paged_attention", "paged_decode", "join_splits", "kv_write",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["registers"] > 0
        assert kernel["stack_bytes"] == kernel["local_bytes"] == 0


def test_the_committed_report_is_that_of_these_kernels_and_none_spills_on_an_h100():
    code = """
import json
from benchmarks.gpu.compiled import sources
from benchmarks.gpu.launches import cases
print(json.dumps([sources(), [[case.kernel, case.shape] for case in cases()]]))
"""
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    digest, cases = json.loads(printed)
    report = json.loads(REPORT.read_text())
    assert report["sources"] == digest, "the kernels have changed: run make gpu-compile"
    for target in ("sm_80", "sm_90"):
        kernels = [kernel for kernel in report["kernels"] if kernel["target"] == target]
        assert [[kernel["kernel"], kernel["shape"]] for kernel in kernels] == cases
    assert not any(
        kernel["stack_bytes"] or kernel["local_bytes"]
        for kernel in report["kernels"]
        if kernel["target"] == "sm_90"
    )
