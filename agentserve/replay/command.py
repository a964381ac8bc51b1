"""`agentserve replay`: from options to a printed report."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from agentserve.replay.accounting import account, print_accounting
from agentserve.replay.display import Display
from agentserve.replay.generator import generate, parse_workload
from agentserve.replay.report import Report, print_report
from agentserve.replay.runner import ReplayError, ReplaySettings, replay
from agentserve.replay.scenario import Scenario, load_scenario
from agentserve.replay.server import own_server

ACCOUNTED_TURNS = (10, 100)


class ReplayOptions(msgspec.Struct, frozen=True):
    """The command line. Exactly one of `file` and `workload` unless `accounting`."""

    file: Path | None = None
    workload: str | None = None  # "sessions=16,turns=20,...": generated instead of read
    sessions: int = 1  # copies of the file's story that run at the same time
    speed: float = 1.0  # tool waits are divided by it
    free: bool = False  # the model answers for itself
    url: str | None = None  # a running server; without it one is started and stopped
    api_key: str | None = None
    model: str = "smollm2-135m"  # of the server that is started
    json_path: Path | None = None
    accounting: bool = False


def run_replay(options: ReplayOptions, console: Console | None = None) -> None:
    """Run the command and print its result.

    Raises ValueError for options or scenarios that cannot be used, AgentserveError or OSError
    when the server fails.
    """
    console = console or Console()
    if options.accounting:
        print_accounting([account(turns) for turns in ACCOUNTED_TURNS], console)
        return
    if options.sessions < 1 or options.speed <= 0:
        raise ValueError("--sessions must be at least 1 and --speed greater than 0")
    scenarios = _scenarios(options)
    settings = ReplaySettings(speed=options.speed, free=options.free, api_key=options.api_key)
    with _server(options, console) as url:
        report = show(scenarios, url, settings, console)
    finish(report, console, options.json_path)


def show(scenarios: list[Scenario], url: str, settings: ReplaySettings, console: Console) -> Report:
    """Replay the scenarios, one session each, with a live display."""
    turns = sum(len(scenario.turns) for scenario in scenarios)
    with Display(console, turns, len(scenarios)) as display:
        return asyncio.run(replay(scenarios, url, settings, display))


def finish(report: Report, console: Console, json_path: Path | None) -> None:
    """Write the JSON, print the report. Raises ReplayError when a session ended early."""
    if json_path is not None:
        json_path.write_bytes(report.to_json())
    print_report(report, console)
    if report.incomplete:
        raise ReplayError(f"{len(report.incomplete)} of the sessions ended early")


def _scenarios(options: ReplayOptions) -> list[Scenario]:
    if (options.file is None) == (options.workload is None):
        raise ValueError("name a scenario file, or --generate a workload, or ask for --accounting")
    if options.file is not None:
        return [load_scenario(options.file)] * options.sessions
    return generate(parse_workload(options.workload or ""))


@contextmanager
def _server(options: ReplayOptions, console: Console) -> Iterator[str]:
    if options.url is not None:
        yield options.url
        return
    console.print(f"starting a server on {options.model} ...", highlight=False)
    with own_server(options.model) as url:
        yield url
