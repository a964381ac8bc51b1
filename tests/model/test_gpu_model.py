"""The GPU's forward pass, graphs and runner in Triton's interpreter, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SHARES = 3  # of the cases: each process imports transformers


@pytest.mark.parametrize("share", range(SHARES))
def test_the_gpu_runner_does_what_the_runner_of_the_cpu_does(share):
    """Forward pass, graphs, slots, sampling, and an engine one step ahead; see the script."""
    script = SUPPORT / "gpu_model_cases.py"
    paths = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    alone = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    ended = subprocess.run(
        [sys.executable, str(script), "--share", str(share), str(SHARES)],
        env=os.environ | alone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    outcomes = json.loads(ended.stdout)
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert not failed, "\n".join(failed.values())
    assert len(outcomes) >= 3
