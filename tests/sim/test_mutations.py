"""The list of seeded bugs fits the code; `make mutants` makes them, which takes minutes."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_text_of_every_seeded_bug_occurs_once():
    with (ROOT / "benchmarks" / "mutations.toml").open("rb") as file:
        mutations = tomllib.load(file)["mutation"]
    counts = {
        one["name"]: (ROOT / "agentserve" / one["file"]).read_text().count(one["old"])
        for one in mutations
    }
    assert len(counts) == len(mutations) >= 40
    assert {name: count for name, count in counts.items() if count != 1} == {}
