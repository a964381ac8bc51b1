"""Does the simulation notice broken residency code? Seeded bugs, each of which must be caught.

mutations.toml lists the bugs: in which file which text is replaced, once, by which other. Each is
made in a copy of the package, and checks run against that copy until one of them fails. All checks
pass without a bug, and a bug that makes one run six times as long as without it is caught, too.

    python benchmarks/mutants.py [--only WORD] [--output benchmarks/results/mutants.json]

Exits with 1 if a bug survives.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from circumstances import ROOT, circumstances

AT_ONCE = 2
LEAST_LIMIT_S = 60.0  # a busy machine is not a bug
PATIENCE = 6.0  # times what a check takes without a bug
PYTEST = ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider")
CHECKS = {
    "races": (*PYTEST, "tests/sim/test_races.py"),
    "simulation": ("-m", "agentserve.engine.sim", "--seeds", "200"),
    "simulated device": ("-m", "agentserve.engine.simrunner", "--seeds", "100"),
    "kv tests": (*PYTEST, "tests/kv"),
    "overlap tests": (*PYTEST, "tests/engine/test_overlap.py", "tests/engine/test_overlap_room.py"),
    "copier tests": (*PYTEST, "tests/model/test_copier.py", "-k", "slots or byte or every_ticket"),
}


class Mutation(NamedTuple):
    """One bug. `checks` are tried in this order; the others of CHECKS follow."""

    name: str
    file: str
    old: str
    new: str
    checks: tuple[str, ...] = ("simulation",)


class Verdict(NamedTuple):
    """What a check said of a package; `error` is empty if it passed."""

    check: str
    seconds: float
    error: str


def apply(mutation: Mutation, package: Path) -> None:
    """Make the bug in a copy of the package. Raises ValueError unless the old text occurs once."""
    path = package / mutation.file
    text = path.read_text()
    found = text.count(mutation.old)
    if found != 1:
        raise ValueError(f"{mutation.name}: its text occurs {found} times in {mutation.file}")
    path.write_text(text.replace(mutation.old, mutation.new))


def run_check(check: str, package: Path, limit_s: float) -> Verdict:
    """Run one check against a package, which lies in a directory of its own."""
    # The directory comes first in the path, so that nothing of an installed package is found.
    paths = f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *CHECKS[check]],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        error = reason(done.stdout + done.stderr) if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"does not end within {limit_s:.0f} s"
    return Verdict(check, time.monotonic() - started, error)


def reason(output: str) -> str:
    """Return the line that says what was wrong: the last error of a traceback or of pytest."""
    lines = [re.sub(r"^E\s+", "", line).strip() for line in output.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Failed)\b.*", line)]
    errors = errors or [line for line in lines if line.startswith("FAILED")]
    return (errors or lines or ["?"])[-1].removeprefix("agentserve.")


def try_mutation(mutation: Mutation, limits: dict[str, float]) -> Verdict | None:
    """Return the first check that fails, with the seconds of all that ran; None if none does."""
    seconds = 0.0
    with tempfile.TemporaryDirectory() as directory:
        package = copy_package(Path(directory))
        apply(mutation, package)
        for check in dict.fromkeys((*mutation.checks, *CHECKS)):
            verdict = run_check(check, package, limits[check])
            seconds += verdict.seconds
            if verdict.error:
                return verdict._replace(seconds=seconds)
    return None


def copy_package(directory: Path) -> Path:
    """Copy the package into `directory`."""
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(ROOT / "agentserve", directory / "agentserve", ignore=ignore))


def measure_limits() -> dict[str, float]:
    """Run every check without a bug and return its time limit. Exits if one fails."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(AT_ONCE) as pool:
        package = copy_package(Path(directory))
        verdicts = list(pool.map(lambda check: run_check(check, package, 600.0), CHECKS))
    for verdict in verdicts:
        print(
            f"without a bug: {verdict.check}: {verdict.error or 'passes'}, {verdict.seconds:.1f} s"
        )
    if any(verdict.error for verdict in verdicts):
        raise SystemExit("the code has a bug of its own, so nothing can be said of others")
    return {v.check: max(LEAST_LIMIT_S, PATIENCE * v.seconds) for v in verdicts}


def load_mutations(only: str) -> list[Mutation]:
    """Read mutations.toml; `only` chooses by a word in the name or the file."""
    with (ROOT / "benchmarks" / "mutations.toml").open("rb") as file:
        entries = tomllib.load(file)["mutation"]
    mutations = [Mutation(**entry) for entry in entries]
    return [one for one in mutations if only in one.name or only in one.file]


def main() -> None:
    parser = argparse.ArgumentParser(description="Seeded bugs, each of which must be caught.")
    parser.add_argument("--only", default="", help="bugs with this in their name or file")
    parser.add_argument("--output", type=Path, help="write a JSON file of the result")
    options = parser.parse_args()
    head, mutations = circumstances("mutants"), load_mutations(options.only)
    for mutation in mutations:  # before minutes are spent
        with tempfile.TemporaryDirectory() as directory:
            apply(mutation, copy_package(Path(directory)))
    limits = measure_limits()
    started = time.monotonic()
    rows = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        verdicts = pool.map(lambda mutation: try_mutation(mutation, limits), mutations)
        for mutation, verdict in zip(mutations, verdicts, strict=True):
            caught = verdict.check if verdict else None
            error, seconds = (verdict.error, verdict.seconds) if verdict else ("", 0.0)
            row = {"name": mutation.name, "file": mutation.file, "caught_by": caught}
            rows.append(row | {"error": error, "seconds": round(seconds, 1)})
            print(f"{mutation.name:<66} {caught or 'SURVIVES':<17} {seconds:5.1f} s  {error[:90]}")
    survivors = [row["name"] for row in rows if row["caught_by"] is None]
    print(
        f"{len(rows) - len(survivors)} of {len(rows)} caught in {time.monotonic() - started:.0f} s"
    )
    if options.output:
        result = head | {"caught": len(rows) - len(survivors), "mutations": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if survivors:
        raise SystemExit(f"not caught: {survivors}")


if __name__ == "__main__":
    main()
