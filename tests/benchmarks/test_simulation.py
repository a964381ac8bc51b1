"""What the recorded simulation does with a seed that fails."""

import sys
from pathlib import Path

import pytest

from agentserve.engine.sim import Simulation, SimulationError, run_seeds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BROKEN = 2


class Broken(Simulation):
    """Fails in one seed, at its end."""

    def __init__(self, seed):
        super().__init__(seed)
        self.seed = seed

    def run(self):
        super().run()
        if self.seed == BROKEN:
            raise SimulationError("INV-06: made up")


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The modules beside the benchmark can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in ("simulation", "circumstances"):
        sys.modules.pop(name, None)


def test_a_failing_seed_is_listed_and_the_others_count():
    from simulation import run_each

    counts, (failed,) = run_each(range(BROKEN - 1, BROKEN + 2), Broken)
    both = run_seeds(BROKEN - 1, 1) + run_seeds(BROKEN + 1, 1)
    assert counts == both
    assert failed["seed"] == BROKEN
    assert failed["error"] == "SimulationError: INV-06: made up"
    assert repr(Broken(BROKEN).world) in failed["note"]
    assert failed["note"].endswith(f"--start {BROKEN} --seeds 1")
