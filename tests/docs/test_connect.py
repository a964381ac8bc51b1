"""The README's table of clients says what was recorded of them."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "compat.json").read_text())


def rows() -> dict[str, list[str]]:
    """Return the table's rows by the names of their clients."""
    readme = (ROOT / "README.md").read_text()
    table = readme[
        readme.index("## With the agent that you have") : readme.index("## What is promised")
    ]
    found = {}
    for line in re.findall(r"^\| (.+) \|$", table, re.M)[1:]:
        cells = line.split(" | ")
        found[re.split(r" \d|,", cells[0])[0]] = cells
    return found


def recorded() -> dict[str, list[dict[str, object]]]:
    """Return what was recorded, by client."""
    clients: dict[str, list[dict[str, object]]] = {}
    for row in RECORD["clients"]:
        clients.setdefault(row["client"].partition(",")[0], []).append(row)
    return clients


def test_every_client_has_a_row_with_the_figures_of_the_record() -> None:
    names = {"langgraph": "langchain"}
    shown = rows()
    assert {names.get(name, name) for name in recorded()} == set(shown)
    for name, runs in recorded().items():
        cells = shown[names.get(name, name)]
        for run in runs:
            figures = ", ".join(f"{step['cached']}/{step['prompt']}" for step in run["steps"][1:])
            assert cells[3] == figures, run["client"]
            form = run["client"].partition(", ")[2]
            assert form in cells[2]


def test_nothing_in_the_record_was_computed_again_without_a_reason() -> None:
    for run in RECORD["clients"]:
        for before, step in zip(run["steps"], run["steps"][1:], strict=False):
            reasons = sum(step["recomputed"].values()) + step["rewritten"] + step["partial_block"]
            assert step["cached"] >= before["prompt"] + before["output"] - 1 - reasons
            assert step["rewritten"] == 0 or run["client"] == "smolagents"
