"""The race: agentserve and its peers on equal work, one after the other, in rounds.

    python benchmarks/peers/run.py [--case NAME]... [--system NAME]... [--rounds 3]
        [--sessions N] [--turns N] [--peers .peers] [--output benchmarks/results/peers.json]
        [--no-floor] [--limit SECONDS]

Every run starts the system anew, warms it up with a prompt that nobody shares, and lets closed-loop
agents play (workload.py): `single`, one session with short tool times; `sixteen`, sixteen with a
second on average; `pressure`, the same with room for 24k tokens of KV. Systems take turns within a
round (A B C, A B C), so that a slow minute of the machine hits no one alone. The result file is
written after each run, and a later call adds to it: leave the machine quiet, and run as many rounds
as its noise asks for. A system that fails is recorded with its reason and the others go on.

Install the peers first: python benchmarks/peers/install.py (`make peers`).
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
from circumstances import circumstances, commit
from peers.agentserve_embedded import AgentserveEmbedded
from peers.agentserve_http import AgentserveHttp
from peers.drive import play
from peers.floors import floor_of_turns, measured_rates
from peers.llamacpp import LlamaCpp
from peers.openvino import OpenVino
from peers.results import Results, Run, table
from peers.system import Places, System
from peers.transformers_cb import TransformersCb
from peers.vllm import Vllm
from peers.workload import CASES, Case, TokenTurn, shared_prefix, sized, token_turns

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (AgentserveHttp, AgentserveEmbedded, Vllm, LlamaCpp, OpenVino, TransformersCb)
}
RESULT = Path("benchmarks/results/peers.json")
LIMIT_S = 1800.0
STATEMENT = (
    "Prompts have the same lengths in every system, answers the same number of sampled tokens. "
    "agentserve is sent texts and forced answers; peers are sent token ids, their own answers "
    "included, so that none tokenises or renders and every prefix cache finds what it computed."
)


async def one_run(
    system: System, case: Case, turns: list[list[TokenTurn]], places: Places, limit_s: float
) -> Run:
    """Start, play, stop; a failure is part of the record."""
    run: Run = {"case": case.label, "system": system.name, "date": _now(), "commit": commit()}
    try:
        begun = time.perf_counter()
        await system.start(case, turns, places)
        run["start_s"] = round(time.perf_counter() - begun, 1)
        run["about"] = system.about()
        async with asyncio.timeout(limit_s):
            played = await play(system, turns)
        run["figures"] = played.figures()
    except TimeoutError:
        run["failure"], run["limit_s"] = f"not done after {limit_s:.0f} s", limit_s
    except Exception as error:
        run["failure"] = f"{type(error).__name__}: {error}"
    finally:
        await system.stop()
    return run


def line(run: Run) -> str:
    """Return one run as a line."""
    head = f"{run['case']:14}{run['system']:21}"
    if "failure" in run:
        return f"{head}failed: {run['failure']}"
    figures = run["figures"]
    return (
        f"{head}makespan {figures['makespan_s']:7.2f} s   TTFT p50 {figures['ttft_p50_s']:6.3f} s"
        f"   turn p50 {figures['turn_p50_s']:6.3f} s   start {run['start_s']:.0f} s"
    )


def race(options: argparse.Namespace, results: Results, places: Places) -> None:
    """Run all rounds; who fails in a case is not tried in it again."""
    cases = [sized(CASES[name], options.sessions, options.turns) for name in options.case]
    work = {case.label: token_turns(case.workload, places.weights) for case in cases}
    if options.floor:
        _keep_floors(results, cases, work, places)
    failed: set[tuple[str, str]] = set()
    for _ in range(options.rounds):
        for case in cases:
            for name in options.system:
                if (case.label, name) in failed:
                    continue
                system = SYSTEMS[name]()
                turns = work[case.label]
                run = asyncio.run(one_run(system, case, turns, places, options.limit))
                if "failure" in run:
                    failed.add((case.label, name))
                results.add(run)
                print(line(run), flush=True)


def _keep_floors(
    results: Results, cases: list[Case], work: dict[str, list[list[TokenTurn]]], places: Places
) -> None:
    rates = measured_rates(places.weights)
    for case in cases:
        turns = work[case.label]
        floor = floor_of_turns(turns, places.weights, rates)
        results.add_floor(
            case.label,
            msgspec.to_builtins(floor)
            | {
                "date": _now(),
                "memory_bytes_per_s": rates.memory_bytes_per_s,
                "flops_per_s": rates.flops_per_s,
                "workload": msgspec.to_builtins(case.workload),
                "kv_tokens": case.kv_tokens,
                "tokens": described(turns),
            },
        )


def described(turns: list[list[TokenTurn]]) -> dict[str, Any]:
    """Return the sizes of the work in tokens."""
    later = [len(turn.new) for session in turns for turn in session[1:]]
    return {
        "shared_prompt": shared_prefix(turns) if len(turns) > 1 else None,
        "first_prompt": len(turns[0][0].new),
        "new_a_turn": round(sum(later) / len(later), 1) if later else None,
        "sampled": sum(turn.output for session in turns for turn in session),
        "at_the_end": max(sum(len(turn.new) + turn.output for turn in one) for one in turns),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--system", action="append", choices=list(SYSTEMS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="how many to add")
    parser.add_argument("--sessions", type=int, help="instead of the case's own")
    parser.add_argument("--turns", type=int, help="instead of the case's own")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="where they are")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one run")
    parser.add_argument("--no-floor", dest="floor", action="store_false", help="measure no rates")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    options.system = options.system or list(SYSTEMS)
    return options


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind, so that what was started is stopped."""
    raise SystemExit(128 + number)


def main() -> None:
    options = parsed()
    signal.signal(signal.SIGTERM, _end)
    root = options.peers.resolve()
    places = Places(root, Path(tempfile.mkdtemp(prefix="race-")), os.cpu_count() or 1)
    head = circumstances("peers") | {"model": "smollm2-135m, bfloat16", "statement": STATEMENT}
    results = Results(options.output, head)
    print(f"{STATEMENT}\nlogs: {places.logs}\n", flush=True)
    race(options, results, places)
    print("", *table(results.summary()), f"\nwritten to {options.output}", sep="\n")


if __name__ == "__main__":
    main()
