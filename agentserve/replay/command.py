"""`agentserve replay`: from options to a printed report."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from agentserve.replay.accounting import account, print_accounting
from agentserve.replay.chat import replay_chat
from agentserve.replay.display import Display
from agentserve.replay.endpoint import Endpoint
from agentserve.replay.generator import generate, parse_workload
from agentserve.replay.logged import Limits
from agentserve.replay.logs import load_log
from agentserve.replay.report import Report, Run, print_report
from agentserve.replay.runner import Observer, ReplayError, ReplaySettings, replay
from agentserve.replay.scenario import Scenario, load_scenario
from agentserve.replay.server import own_server
from agentserve.replay.sidebyside import output_lengths

Play = Callable[[Observer], Coroutine[Any, Any, Report]]

DEFAULT_MODEL = "smollm2-135m"
ACCOUNTED_TURNS = (10, 100)


class ReplayOptions(msgspec.Struct, frozen=True):
    """The command line. Exactly one of `file` and `workload` unless `accounting`."""

    file: Path | None = None  # a scenario or a log
    workload: str | None = None  # "sessions=16,turns=20,...": generated instead of read
    sessions: int = 1  # copies of the file's story that run at the same time
    turns: int | None = None  # only so many of each session
    speed: float = 1.0  # tool waits are divided by it
    max_wait: float = 60.0  # of a log's tool waits, seconds
    tool_seconds: float = 0.0  # where a log has no times
    free: bool = False  # the model answers for itself
    dialect: Literal["session", "chat"] = "session"
    url: str | None = None  # a running server; without it one is started and stopped
    api_key: str | None = None
    model: str | None = None  # of the server that is started, or that an endpoint is asked for
    extra: str | None = None  # a JSON object: more fields of the chat dialect's requests
    lengths: Path | None = None  # a report, whose output lengths the chat dialect asks for
    json_path: Path | None = None
    accounting: bool = False


def run_replay(options: ReplayOptions, console: Console | None = None) -> None:
    """Run the command and print its result.

    Raises ValueError for options, scenarios or logs that cannot be used, AgentserveError or OSError
    when the server fails.
    """
    console = console or Console()
    if options.accounting:
        print_accounting([account(turns) for turns in ACCOUNTED_TURNS], console)
        return
    if options.sessions < 1 or options.speed <= 0:
        raise ValueError("--sessions must be at least 1 and --speed greater than 0")
    settings = ReplaySettings(
        speed=options.speed,
        free=options.free,
        api_key=options.api_key,
        lengths=output_lengths(options.lengths) if options.lengths is not None else {},
    )
    if options.dialect == "chat":
        endpoint = _endpoint(options)
        scenarios = _scenarios(options, console)
        report = watch(
            lambda display: replay_chat(scenarios, endpoint, settings, display), scenarios, console
        )
    else:
        if options.extra is not None or options.lengths is not None:
            raise ValueError("--extra and --lengths are of --dialect chat")
        scenarios = _scenarios(options, console)
        with _server(options, console) as url:
            report = show(scenarios, url, settings, console)
        if options.url is None:
            run = Run("session", "a server of its own", options.model or DEFAULT_MODEL)
            report = msgspec.structs.replace(report, run=run)
    finish(report, console, options.json_path)


def show(scenarios: list[Scenario], url: str, settings: ReplaySettings, console: Console) -> Report:
    """Replay the scenarios on the session API, one session each, with a live display."""
    return watch(lambda display: replay(scenarios, url, settings, display), scenarios, console)


def watch(play: Play, scenarios: list[Scenario], console: Console) -> Report:
    """Run a replay of the scenarios with a live display."""
    turns = sum(len(scenario.turns) for scenario in scenarios)
    with Display(console, turns, len(scenarios)) as display:
        return asyncio.run(play(display))


def finish(report: Report, console: Console, json_path: Path | None) -> None:
    """Write the JSON, print the report. Raises ReplayError when a session ended early."""
    if json_path is not None:
        json_path.write_bytes(report.to_json())
    print_report(report, console)
    if report.incomplete:
        raise ReplayError(f"{len(report.incomplete)} of the sessions ended early")


def _scenarios(options: ReplayOptions, console: Console) -> list[Scenario]:
    """Return the story of each session that is to run."""
    if (options.file is None) == (options.workload is None):
        raise ValueError(
            "name a scenario or a log, or --generate a workload, or ask for --accounting"
        )
    if options.file is None:
        scenarios = generate(parse_workload(options.workload or ""))
    elif options.file.suffix == ".toml":
        scenarios = [load_scenario(options.file)] * options.sessions
    else:
        scenarios = _logged(options.file, options, console) * options.sessions
    return [msgspec.structs.replace(one, turns=one.turns[: options.turns]) for one in scenarios]


def _logged(path: Path, options: ReplayOptions, console: Console) -> list[Scenario]:
    """Read a log and say what was found in it."""
    limits = Limits(options.max_wait, options.tool_seconds, options.turns)
    log = load_log(path, limits)
    waits = sum(one.tool_seconds(turn) for one in log.scenarios for turn in one.turns)
    turns = sum(len(one.turns) for one in log.scenarios)
    lines = [f"{path}: {log.format}, {turns} turns, {waits / options.speed:.0f} s of tool waits"]
    for line in lines + [f"  {note}" for note in log.notes]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return log.scenarios


def _endpoint(options: ReplayOptions) -> Endpoint:
    if options.url is None:
        raise ValueError("--dialect chat needs the --url of an endpoint, such as http://host/v1")
    try:
        extra = msgspec.json.decode(options.extra or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"--extra is no JSON object: {error}") from None
    return Endpoint(options.url, options.api_key, options.model, extra)


@contextmanager
def _server(options: ReplayOptions, console: Console) -> Iterator[str]:
    if options.url is not None:
        yield options.url
        return
    model = options.model or DEFAULT_MODEL
    console.print(
        f"starting a server on {model} (a first start compiles kernels and takes minutes) ...",
        highlight=False,
        soft_wrap=True,
    )
    with own_server(model) as url:
        yield url
