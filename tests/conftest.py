"""What every test run sets at its start and reports at its end, summed over all workers."""

import os

import pytest
from counts import COUNTS
from hypothesis import settings

from agentserve.config import kernel_cache

os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache()))  # read when numba is imported

settings.register_profile("agentserve", deadline=None)  # no test asserts times
settings.load_profile("agentserve")


def pytest_sessionfinish(session):
    """Hand a worker's counts to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counts"] = dict(COUNTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take a worker's counts."""
    COUNTS.update(getattr(node, "workeroutput", {}).get("counts", {}))


def pytest_terminal_summary(terminalreporter):
    """Print how much the simulation and the state machines did."""
    for name, count in sorted(COUNTS.items()):
        terminalreporter.write_line(f"{name}: {count}")
