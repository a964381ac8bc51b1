"""Each figure that has a goal, beside it: what gpu_check.py comes to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """What is to be reached (DESIGN section 9), and where the figures are: those of every case."""

    at_least: float
    section: str
    figures: Callable[[Mapping[str, Any]], Mapping[str, Any]]


def column(part: str, name: str, *under: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return `name` of each case of a section's part, found under further keys of the case."""

    def found(section: Mapping[str, Any]) -> dict[str, Any]:
        figures = {}
        for case, row in section.get(part, {}).items():
            for key in under:
                row = row.get(key) if isinstance(row, Mapping) else None
            if isinstance(row, Mapping) and name in row:
                figures[case] = row[name]
        return figures

    return found


def both_directions(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return how fast ours is beside one plain copy, for saves and for loads."""
    return {
        kind: section["bandwidth"][kind]["ratio"]
        for kind in ("save", "load")
        if kind in section.get("bandwidth", {})
    }


def speedup(section: Mapping[str, Any]) -> dict[str, Any]:
    return {"agents": section["speedup"]} if "speedup" in section else {}


GOALS = {
    "decode_of_bandwidth": Goal(0.8, "model", column("decode", "of_bandwidth")),
    "prefill_mfu": Goal(0.55, "model", column("prefill", "mfu")),
    "swap_of_pinned_copy": Goal(0.85, "residency", both_directions),
    "times_transformers_batching": Goal(3.0, "batching", speedup),
    "prefill_attention_of_varlen": Goal(
        0.9, "kernels", column("prefill", "speed_of_ours", "varlen")
    ),
    "decode_attention_of_varlen": Goal(0.9, "kernels", column("decode", "speed_of_ours", "varlen")),
}


def summary(sections: Sections) -> dict[str, Any]:
    """Return for each goal: the goal, the lowest figure and all of them, and whether it is met.

    "not measured" stands where a section did not get so far.
    """
    return {name: judged(goal, sections) for name, goal in GOALS.items()}


def judged(goal: Goal, sections: Sections) -> dict[str, Any]:
    figures = goal.figures(sections.get(goal.section, {}))
    if not figures:
        return {"goal": goal.at_least, "figure": "not measured"}
    lowest = min(figures.values())
    return {
        "goal": goal.at_least,
        "figure": lowest,
        "met": lowest >= goal.at_least,
        "cases": figures,
    }
