"""The GPU kernels in Triton's interpreter, in processes of their own: it is chosen at import."""

import json
import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
ALONE = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
LARGE = 2**32  # bytes; each of the buffers is larger


def run(script, *arguments):
    """What a script of tests/support prints."""
    ended = subprocess.run(
        [sys.executable, str(SUPPORT / script), *arguments],
        env=os.environ | ALONE | {"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_every_kernel_does_what_its_reference_does():
    outcomes = run("gpu_cases.py")
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert not failed, "\n".join(failed.values())
    assert len(outcomes) > 20


def test_offsets_beyond_32_bits_are_reached_and_nothing_else_is_touched():
    outcome = run("gpu_large_cases.py")
    failed = {name: text for name, text in outcome["cases"].items() if text != "passed"}
    assert not failed, "\n".join(failed.values())
    assert outcome["occupied_bytes"] < LARGE / 2


def test_the_philox_of_the_reference_gives_the_known_answers():
    from agentserve_kernels.gpu.sampling_rows import philox

    # Random123's test vectors (kat_vectors, philox4x32 10) whose counter ends in zeros.
    assert philox(0, 0) == 0x6627E8D5


def test_the_cpu_kernels_do_not_import_triton():
    code = """
import importlib, pkgutil, sys
import agentserve_kernels
names = [m.name for m in pkgutil.iter_modules(agentserve_kernels.__path__) if not m.ispkg]
for name in names:
    importlib.import_module(f"agentserve_kernels.{name}")
print(len(names), "triton" in sys.modules)
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(printed[0]) >= 8
    assert printed[1] == "False"
