"""The floor of each case from benchmarks/floor.py, for the very tokens that the systems compute.

    python benchmarks/peers/floors.py MODEL-DIRECTORY      prints this machine's rates as JSON

The rates are measured in a process of its own, which has ended before a system starts.
"""

import subprocess
import sys
from pathlib import Path

import msgspec
from floor import Floor, TurnWork, floor_of_sessions
from floor_rates import Rates, measure_rates
from peers.workload import TokenTurn, shared_prefix

from agentserve.model.spec import load_spec


def measured_rates(weights: Path) -> Rates:
    """Measure this machine, with the shapes of the model in `weights`."""
    command = [sys.executable, str(Path(__file__)), str(weights)]
    done = subprocess.run(command, check=True, capture_output=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Rates)


def floor_of_turns(sessions: list[list[TokenTurn]], weights: Path, rates: Rates) -> Floor:
    """Return the least time of these sessions with 16-bit weights and KV."""
    shared = shared_prefix(sessions) if len(sessions) > 1 else 0
    work = [turn_work(turns, shared if number else 0) for number, turns in enumerate(sessions)]
    return floor_of_sessions(work, load_spec(weights), rates, shared=shared)


def turn_work(turns: list[TokenTurn], cached: int) -> list[TurnWork]:
    """Return a session's turns; `cached` tokens of its first prompt have KV already.

    The token that a turn samples last gets its KV in the next turn.
    """
    work = []
    for index, turn in enumerate(turns):
        new = len(turn.new) + 1 if index else len(turn.new) - cached
        work.append(TurnWork(new, cached, turn.output, turn.gap_s))
        cached += new + turn.output - 1
    return work


def main() -> None:
    rates = measure_rates(load_spec(Path(sys.argv[1])))
    sys.stdout.buffer.write(msgspec.json.encode(rates) + b"\n")


if __name__ == "__main__":
    main()
