"""`agentserve demo`: the real server, a real model, an agent's hundred turns; then six agents."""

import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

import agentserve
from agentserve.model.prepare import prepare
from agentserve.replay.command import finish, show
from agentserve.replay.compare import AGENTS, DEVICE_TOKENS, compare
from agentserve.replay.runner import ReplaySettings
from agentserve.replay.scenario import Scenario, load_scenario
from agentserve.replay.server import own_server

SCENARIO = Path(agentserve.__file__).parents[1] / "scenarios" / "coding.toml"


def run_demo(
    model: str = "smollm2-135m",
    free: bool = False,
    turns: int | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """Prepare the model, serve it, replay the coding scenario, stop the server, report.

    free: the model answers for itself instead of being made to tell the story
    turns: only so many of the hundred

    Raises OSError when the server does not start, ValueError when the scenario cannot be used.
    """
    console = console or Console()
    scenario = _scenario(turns)
    console.print(f"1. Preparing {model} (the first time takes longer).", highlight=False)
    _prepare(model, console)
    console.print(
        "2. Starting the server; it loads the model in an engine process. The first\n"
        "   time it also compiles kernels, which takes minutes on a small machine."
    )
    started = time.perf_counter()
    with own_server(model) as url:
        seconds = time.perf_counter() - started
        console.print(f"   Ready at {url} after {seconds:.1f} s.", highlight=False)
        console.print(f"3. {_introduction(scenario, free)}\n", highlight=False, soft_wrap=True)
        # Story seconds are not waited for: the tools take their own time.
        report = show([scenario], url, ReplaySettings(speed=float("inf"), free=free), console)
    console.print("\n4. The server is stopped. What it took:")
    finish(report, console, json_path)


def run_second_demo(model: str = "smollm2-135m", console: Console | None = None) -> None:
    """Let six agents share KV for two, first without a host tier, then with it, and report.

    Raises OSError when a server does not start, ReplayError when an agent does not get to its end.
    """
    console = console or Console()
    console.print(
        f"\nPart 2: {AGENTS.sessions} agents, whose tools take {AGENTS.gap:g} s on average, and "
        f"device KV for two\n   of them ({DEVICE_TOKENS:,} tokens). Twice the same work: where "
        "KV that had to leave is computed again,\n   and where it goes to the host tier and "
        "comes back. On a CPU both tiers are the same DRAM.",
        highlight=False,
        soft_wrap=True,
    )
    _prepare(model, console)
    compare(model, console)


def _scenario(turns: int | None) -> Scenario:
    scenario = load_scenario(SCENARIO)
    return msgspec.structs.replace(scenario, turns=scenario.turns[:turns])


def _introduction(scenario: Scenario, free: bool) -> str:
    what = f"{scenario.description} {len(scenario.turns)} turns, one request each."
    if free:
        return f"{what}\n   The model answers for itself; it is small and chooses badly."
    return (
        f"{what}\n   Its answers are given, and decoded token by token as if it had sampled them."
    )


def _prepare(model: str, console: Console) -> None:
    """Convert the model, with a bar for as long as that takes."""
    columns = (TextColumn("   {task.description}"), BarColumn(bar_width=30))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(done: int, total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total or None)

        prepare(model, advance)
