import os
from pathlib import Path

import pytest

SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(autouse=True)
def child_sees_support(monkeypatch, tmp_path):
    """Engine processes find the factories of tests/support and keep nothing in the home."""
    paths = [SUPPORT, os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("AGENTSERVE_CACHE", str(tmp_path / "cache"))
