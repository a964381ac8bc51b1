"""The seeded simulation of the whole engine on the simulated device."""

import pytest
from counts import COUNTS

from agentserve.engine import sim
from agentserve.engine.copier import Copier
from agentserve.engine.simdevice import RaceError
from agentserve.engine.simrunner import DeviceSimulation, StaleReadError

pytestmark = pytest.mark.sim
SEEDS = 80


def test_80_seeds_have_no_race_and_give_the_reference_tokens():
    total = sim.run_seeds(0, SEEDS, DeviceSimulation)
    COUNTS["simulation seeds on the simulated device"] += total["seeds"]
    for what in (
        "saves",
        "loads",
        "host evictions",
        "stale completions",
        "ended by error",
        "discarded tokens",
    ):
        assert total[what] > 0, f"no seed reached {what}"


def test_a_seed_replays_exactly():
    first, second = (sim.run_seeds(3, 2, DeviceSimulation) for _ in range(2))
    assert first == second


def test_a_copier_that_reports_copies_in_flight_does_not_pass(monkeypatch):
    def poll(self):
        flights = [flight for queue in self._flights.values() for flight in queue]
        for queue in self._flights.values():
            queue.clear()
        return [flight.copy.ticket for flight in flights]

    monkeypatch.setattr(Copier, "poll", poll)
    with pytest.raises((RaceError, StaleReadError)) as caught:
        sim.run_seeds(0, SEEDS, DeviceSimulation)
    assert "simrunner --start" in "".join(caught.value.__notes__)
