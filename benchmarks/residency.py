"""What KV residency is worth: 16 closed-loop agents on SmolLM2 whose KV is 4 times the device's.

Four servers do equal work, with forced outputs and the same tool times, each in fresh processes:

unlimited    the device's KV holds all agents
tool-aware   a quarter of that, a host tier, victims by the expected return of their tools
lru+host     the same room, victims by least recent use
device-lru   the same quarter and no host tier: a prefix cache, what is evicted is computed again

They take turns (A B C D, A B C D); a figure is the median over the rounds. The device's KV is
sized by what the first run of `unlimited` held. The agents' tools take 1 s on average; then, once
and with fewer turns, 8 s. Both tiers are DRAM here, so this emulates a device with its own memory.

    python benchmarks/residency.py [--quick] [--part short|long] [--output FILE]

`--part` measures one of the two again; the other keeps its runs in the file, with their own commit.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from circumstances import circumstances

from agentserve.replay.agents import AgentsRun, Tiers, run_agents, token_bytes
from agentserve.replay.generator import Workload
from agentserve.replay.report import TurnRecord

MODEL = "smollm2-135m"
RESULT = Path("benchmarks/results/residency.json")
STATEMENT = (
    "Both tiers are DRAM of the same machine: an emulation of a device with memory of its own. "
    "Copies run in a thread that shares the cores and the memory's bandwidth with the model."
)
SHARE = 4  # the working set over the device's KV
GENEROUS = 2048  # tokens of KV for each agent where the device holds everything
POLICIES = ("unlimited", "tool-aware", "lru+host", "device-lru")
SLOW_POLICIES = ("unlimited", "tool-aware", "lru+host")
BASELINES = ("lru+host", "unlimited", "device-lru")
SUMMARY = (
    "makespan_s",
    "ttft_p50_s",
    "turn_p50_s",
    "turn_p95_s",
    "prefill_computed",
    "new_tokens",
)


class Plan(msgspec.Struct, frozen=True):
    """What is run: the workload with short tool times, `rounds` times, then one with long ones."""

    workload: Workload
    rounds: int
    slow: Workload
    slow_policies: tuple[str, ...]


FULL = Workload(sessions=16, turns=8, prompt=250, first=300, new=70, output=16, gap=1.0, seed=1)
SMALL = msgspec.structs.replace(FULL, sessions=8, turns=3, prompt=100, first=100, new=40)
PLANS = {
    False: Plan(FULL, 2, msgspec.structs.replace(FULL, turns=4, gap=8.0), SLOW_POLICIES),
    True: Plan(SMALL, 1, msgspec.structs.replace(SMALL, turns=2, gap=2.0), SLOW_POLICIES[:2]),
}


class Quiet:
    """Counts the turns of a run on stderr, where somebody can see it."""

    def __init__(self) -> None:
        self._turns = 0

    def heard(self, user: str) -> None:
        """Show nothing: the words are made up."""

    def turn(self, record: TurnRecord) -> None:
        """Count a turn."""
        self._turns += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self._turns} turns\r")


def tiers_of(policy: str, sessions: int, working_set: int) -> Tiers:
    """Return the room that a policy gets; before anything ran, only `unlimited` can be asked."""
    if policy == "unlimited":
        return Tiers("device-lru", sessions * GENEROUS)
    host = 0 if policy == "device-lru" else 2 * working_set
    return Tiers(policy, working_set // SHARE, host)


class Bench:
    """Runs policies and keeps what they gave."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.working_sets: dict[float, int] = {}  # by mean gap

    def round(self, workload: Workload, policies: tuple[str, ...], number: int) -> None:
        """Run every policy once."""
        for policy in policies:
            self._run(workload, policy, number)

    def _run(self, workload: Workload, policy: str, number: int) -> None:
        working_set = self.working_sets.get(workload.gap, 0)
        tiers = tiers_of(policy, workload.sessions, working_set)
        run = run_agents(MODEL, workload, tiers, Quiet())
        if policy == "unlimited":
            self.working_sets.setdefault(workload.gap, run.working_set())
        row = described(run) | {"policy": policy, "gap_s": workload.gap, "round": number}
        self.runs.append(row | {"tiers": msgspec.to_builtins(tiers)})
        print(line(policy, row["figures"]), flush=True)

    def keep(self, earlier: dict[str, Any], measured: set[float]) -> None:
        """Take over the runs of an earlier result whose gaps were not measured again."""
        origin = {"commit": earlier["commit"], "date": earlier["date"]}
        kept = [origin | run for run in earlier["runs"] if run["gap_s"] not in measured]
        self.runs = kept + self.runs
        for name, tokens in earlier["working_set_tokens"].items():
            gap = float(name.removeprefix("gap_").removesuffix("_s"))
            self.working_sets.setdefault(gap, tokens)

    def summary(self, gap: float) -> dict[str, dict[str, float]]:
        """Return the medians over the rounds: policy -> figure."""
        return {
            policy: {
                name: statistics.median(
                    run["figures"][name]
                    for run in self.runs
                    if run["policy"] == policy and run["gap_s"] == gap
                )
                for name in SUMMARY
            }
            for policy in POLICIES
            if any(run["policy"] == policy and run["gap_s"] == gap for run in self.runs)
        }


def described(run: AgentsRun) -> dict[str, Any]:
    """The figures of a run, the copier's bandwidth, and the server's counters."""
    figures = run.figures()
    moved = figures.saved_bytes + figures.loaded_bytes
    rate = moved / figures.copy_s if figures.copy_s else None
    return {
        "figures": msgspec.to_builtins(figures),
        "copier_bytes_per_s": rate,
        "counters": run.counters,
    }


HEAD = (
    f"{'':12}{'makespan':>10}{'TTFT p50':>10}{'turn p50':>10}{'p95':>9}{'prefill':>9}{'new':>8}"
    f"{'saved':>9}{'loaded':>9}"
)


def line(policy: str, row: dict[str, Any]) -> str:
    """One row of the table, of a run or of the summary."""
    text = (
        f"{policy:12}{row['makespan_s']:8.1f} s{row['ttft_p50_s']:8.2f} s{row['turn_p50_s']:8.2f} s"
        f"{row['turn_p95_s']:7.1f} s{row['prefill_computed']:9,.0f}{row['new_tokens']:8,.0f}"
    )
    if "saved_bytes" in row:
        text += f"{row['saved_bytes'] / 2**20:5.0f} MiB{row['loaded_bytes'] / 2**20:5.0f} MiB"
    return text


def ratios(summary: dict[str, dict[str, float]]) -> list[str]:
    """Say how tool-aware compares, with the host tier's plain LRU first."""
    own = summary["tool-aware"]
    lines = []
    for policy in BASELINES:
        if other := summary.get(policy):
            parts = ", ".join(
                f"{name} {own[key] / other[key]:.2f}"
                for name, key in (
                    ("makespan", "makespan_s"),
                    ("TTFT p50", "ttft_p50_s"),
                    ("turn p50", "turn_p50_s"),
                    ("turn p95", "turn_p95_s"),
                    ("prefill", "prefill_computed"),
                )
            )
            lines.append(f"tool-aware / {policy:10}  {parts}")
    lines.append(
        f"tool-aware: prefill / new tokens  {own['prefill_computed'] / own['new_tokens']:.3f}"
    )
    return lines


def document(bench: Bench, plan: Plan, seconds: float) -> dict[str, Any]:
    """Everything that was measured, the summary of the short tool times first."""
    return {
        "summary": bench.summary(plan.workload.gap),
        "summary_long_gaps": bench.summary(plan.slow.gap),
        "workload": msgspec.to_builtins(plan.workload),
        "workload_long_gaps": msgspec.to_builtins(plan.slow),
        "working_set_tokens": {f"gap_{gap:g}_s": n for gap, n in bench.working_sets.items()},
        "kv_bytes_per_token": token_bytes(MODEL),
        "notes": [
            STATEMENT,
            "prefill_computed is what the engine computed, new_tokens what the turns brought; the "
            "shared prompt is new in every session and computed once.",
            "Outputs are forced, so that every policy does the same work.",
        ],
        "seconds": round(seconds),
        "runs": bench.runs,
    }


def report(bench: Bench, workload: Workload) -> None:
    """Print the medians of one workload and the ratios."""
    summary = bench.summary(workload.gap)
    print(f"\nmedians, tools take {workload.gap:g} s on average\n{HEAD}")
    for policy, row in summary.items():
        print(line(policy, row))
    print(*ratios(summary), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small size, to try the script")
    parser.add_argument("--part", choices=("short", "long"), help="only these tool times")
    parser.add_argument("--output", type=Path, help=f"{RESULT}; none with --quick")
    options = parser.parse_args()
    output = options.output or (None if options.quick else RESULT)
    plan, bench, head = PLANS[options.quick], Bench(), circumstances("residency")
    measured = [plan.workload] * (options.part != "long") + [plan.slow] * (options.part != "short")
    started = time.perf_counter()
    print(f"{STATEMENT}\n\n{HEAD}")
    if plan.workload in measured:
        for number in range(1, plan.rounds + 1):
            bench.round(plan.workload, POLICIES, number)
    if plan.slow in measured:
        print(f"tools take {plan.slow.gap:g} s on average, {plan.slow.turns} turns:")
        bench.round(plan.slow, plan.slow_policies, 1)
    for workload in measured:
        report(bench, workload)
    for run in bench.runs:
        run |= {"commit": head["commit"], "date": head["date"]}
    if options.part and output is not None and output.exists():
        bench.keep(json.loads(output.read_text()), {workload.gap for workload in measured})
    head |= {"model": MODEL, "statement": STATEMENT}
    result = head | document(bench, plan, time.perf_counter() - started)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
