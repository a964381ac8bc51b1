"""The race's result file: runs are added to it, and the summary is made of all that it has."""

import json
import statistics
from pathlib import Path
from typing import Any

FIGURES = ("makespan_s", "ttft_p50_s", "turn_p50_s")
OWN = "agentserve"  # and what begins with it

Run = dict[str, Any]


def is_own(system: str) -> bool:
    """Whether a system is agentserve in one of its forms."""
    return system == OWN or system.startswith(f"{OWN}-")


class Results:
    """A result file, written after every run; one that exists is continued."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Read what is there; `head` (the circumstances) replaces what it began with."""
        self._path = path
        before = json.loads(path.read_text()) if path.exists() else {}
        self._document = before | head
        self._runs: list[Run] = self._document.setdefault("runs", [])
        self._floors: dict[str, Any] = self._document.setdefault("floors", {})

    @property
    def runs(self) -> list[Run]:
        """All runs of all invocations, failed ones included."""
        return self._runs

    def add(self, run: Run) -> None:
        """Keep a run and write the file."""
        self._runs.append(run)
        self.write()

    def add_floor(self, case: str, floor: dict[str, Any]) -> None:
        """Keep the floor of a case as it was measured last, and write the file."""
        self._floors[case] = floor
        self.write()

    def write(self) -> None:
        """Write the file with its summary."""
        document = {"summary": self.summary(), **self._document}
        document["summary"] = self.summary()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document, indent=1) + "\n")

    def summary(self) -> dict[str, Any]:
        """Return per case and system the medians over its runs; see `summarise`."""
        floors = {case: floor["seconds"] for case, floor in self._floors.items()}
        return summarise(self._runs, floors)


def summarise(runs: list[Run], floors: dict[str, float]) -> dict[str, Any]:
    """Return case -> system -> medians and number of runs, with `floor_s` and ratios beside them.

    `ratio_to_best_peer` is system -> figure -> ours over the least among the peers. A system whose
    every run failed has `failure`, and `makespan_at_least_s` if it was stopped at a limit; then
    `makespan_ratio_at_most` counts it with that. What was not measured is None.
    """
    summary: dict[str, Any] = {}
    for case in dict.fromkeys(run["case"] for run in runs):
        mine = [run for run in runs if run["case"] == case]
        systems = {
            name: medians([run for run in mine if run["system"] == name])
            for name in dict.fromkeys(run["system"] for run in mine)
        }
        summary[case] = systems | {
            "floor_s": floors.get(case),
            "best_peer": best_peer(systems),
            "ratio_to_best_peer": ratios(systems),
            "makespan_ratio_at_most": makespan_ratios_at_most(systems),
        }
    return summary


def medians(runs: list[Run]) -> dict[str, Any]:
    """Return one system's medians over the runs that did not fail, else the last failure."""
    good = [run["figures"] for run in runs if "figures" in run]
    if not good:
        limits = [run["limit_s"] for run in runs if "limit_s" in run]
        bound = {"makespan_at_least_s": max(limits)} if limits else {}
        return {"runs": 0, "failure": runs[-1]["failure"]} | bound
    figures = {name: statistics.median(run[name] for run in good) for name in FIGURES}
    return {name: round(value, 4) for name, value in figures.items()} | {"runs": len(good)}


def best_peer(systems: dict[str, dict[str, Any]]) -> str | None:
    """Return the peer with the shortest makespan."""
    peers = {name: row for name, row in systems.items() if row["runs"] and not is_own(name)}
    return min(peers, key=lambda name: float(peers[name]["makespan_s"]), default=None)


def ratios(systems: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Return each of our systems' figures over the best that any peer has of that figure."""
    peers = [row for name, row in systems.items() if row["runs"] and not is_own(name)]
    own = {name: row for name, row in systems.items() if row["runs"] and is_own(name)}
    if not peers or not own:
        return None
    return {
        name: {
            figure: round(row[figure] / min(peer[figure] for peer in peers), 3)
            for figure in FIGURES
        }
        for name, row in own.items()
    }


def makespan_ratios_at_most(systems: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """Return each of our makespans over the least of the peers, known or at least.

    None where no peer was stopped at a limit.
    """
    peers = [row for name, row in systems.items() if not is_own(name)]
    if not any("makespan_at_least_s" in row for row in peers):
        return None
    least = min(
        row[name] for row in peers for name in ("makespan_s", "makespan_at_least_s") if name in row
    )
    own = {name: row for name, row in systems.items() if row["runs"] and is_own(name)}
    return {name: round(row["makespan_s"] / least, 3) for name, row in own.items()}


def table(summary: dict[str, Any]) -> list[str]:
    """Return the summary as lines: a block per case, a row per system."""
    lines = []
    for case, block in summary.items():
        floor = "" if block["floor_s"] is None else f", floor {block['floor_s']:.1f} s"
        lines += ["", f"{case}{floor}"]
        lines.append(f"  {'':21}{'makespan':>11}{'TTFT p50':>11}{'turn p50':>11}{'runs':>6}")
        for name, row in block.items():
            if isinstance(row, dict) and "runs" in row:
                lines.append(_row(name, row))
        for name, ratio in (block["ratio_to_best_peer"] or {}).items():
            shares = "".join(f"{ratio[figure]:11.2f}  " for figure in FIGURES)
            lines.append(f"  {name + ' / best':21}{shares}".rstrip())
        for name, most in (block["makespan_ratio_at_most"] or {}).items():
            lines.append(f"  {name + ' / best':21}{most:11.2f}   at most: a peer was stopped")
    return lines[1:]


def _row(name: str, row: dict[str, Any]) -> str:
    if not row["runs"]:
        return f"  {name:21}  failed: {row['failure'][:200]}"
    times = "".join(f"{row[figure]:9.2f} s" for figure in FIGURES)
    return f"  {name:21}{times}{row['runs']:6}"
