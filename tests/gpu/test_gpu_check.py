"""benchmarks/gpu_check.py as a bare machine has it, except that the device is the CPU."""

import importlib.metadata as metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "msgspec")
BARE = """
import sys
from importlib.machinery import PathFinder

FORBIDDEN = {forbidden!r}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in FORBIDDEN
        return None if hidden else super().find_spec(name, path, target)

# An editable install of this project is not there either.
sys.meta_path[:] = [
    Bare if finder is PathFinder else finder
    for finder in sys.meta_path
    if "__editable__" not in getattr(finder, "__module__", "")
]
"""


def with_their_own(packages):
    """The packages and everything that they require here, by canonical name."""
    found, queue = set(), list(packages)
    while queue:
        name = canonicalize_name(queue.pop())
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform
        found.add(name)
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found


@pytest.fixture
def bare(tmp_path):
    """An environment whose processes find no other packages."""
    allowed = with_their_own(PACKAGES)
    forbidden = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not allowed.intersection(map(canonicalize_name, owners))
    }
    forbidden -= {"agentserve", "agentserve_kernels"}  # found beside the script, or not at all
    assert {"numba", "xgrammar", "starlette", "agentserve_tools"} <= forbidden
    (tmp_path / "sitecustomize.py").write_text(BARE.format(forbidden=forbidden))
    return os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}


def run(environment, *arguments):
    """The exit status and the sections of the JSON."""
    out = Path(environment["PYTHONPATH"]) / "out.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    ended = subprocess.run(
        command, env=environment, cwd=out.parent, capture_output=True, text=True, check=False
    )
    assert out.exists(), ended.stderr
    return ended.returncode, json.loads(out.read_text())["sections"]


def test_every_section_passes_with_the_packages_of_a_bare_machine(bare):
    status, sections = run(bare, "--device", "cpu", "--tiny")
    assert {name: part.get("problems") for name, part in sections.items()} == {
        "environment": None,
        "residency": None,
        "kernels": None,
    }
    assert status == 0
    residency = sections["residency"]
    assert residency["exactness"]["tokens_equal"]
    assert residency["exactness"]["kv_bytes_equal"]
    assert list(residency["resume"]["contexts"]) == ["64", "128"]
    assert {"save", "load", "both"} <= residency["bandwidth"].keys()
    assert residency["overlap"]["copied_gb_s"] > 0
    assert set(sections["kernels"]["correctness"].values()) == {"passed"}


def test_a_part_that_raises_is_recorded_and_the_others_still_run(bare):
    status, sections = run(bare, "--device", "cuda:99", "--tiny")
    assert status == 1
    assert sections["environment"]["problems"].keys() == {"gpu", "flash_attention"}
    assert sections["environment"]["versions"]["torch"]
    assert sections["residency"]["problems"].keys() == {
        "bandwidth", "overlap", "exactness", "resume",
    }  # fmt: skip
    assert sections["kernels"]["problems"].keys() == {
        "correctness", "prefill", "decode", "rows", "tunings",
    }  # fmt: skip


def test_a_section_that_overruns_is_stopped_and_the_next_one_still_starts(bare):
    status, sections = run(bare, "--device", "cpu", "--tiny", "--limit-s", "0.1")
    assert status == 1
    assert {name: part["status"] for name, part in sections.items()} == {
        "environment": "timed out",
        "residency": "timed out",
        "kernels": "timed out",
    }
