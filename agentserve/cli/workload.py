"""`agentserve replay | report | demo`: run a recorded or generated agent on a server; compare."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentserve.cli.options import DEFAULT_MODEL, ApiKeyOption, Json

Url = Annotated[
    str | None,
    typer.Option(
        help="A running server, started with --allow-force unless --free is given; in the chat "
        "dialect an endpoint such as http://host/v1. Without it a server is started on --model "
        "and stopped afterwards."
    ),
]
Model = Annotated[str, typer.Option(help="Model of the server that is started.")]
Free = Annotated[
    bool, typer.Option("--free", help="Let the model answer instead of forcing the outputs.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="OUT", help="Also write the report to this file, as JSON."),
]


def replay(  # noqa: PLR0913 - one argument per command line option
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A scenario (.toml), a log of OpenAI messages, or a session log of Claude Code "
            "(.jsonl, also gzipped).",
            metavar="LOG",
            show_default=False,
        ),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=N,...", help="Generate the workload instead: sessions=16,turns=20,..."
        ),
    ] = None,
    sessions: Annotated[
        int, typer.Option(min=1, help="Copies of the file that run at the same time.")
    ] = 1,
    turns: Annotated[
        int | None,
        typer.Option(min=1, help="Only so many turns of each session.", show_default=False),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="Tool seconds are divided by this; 1 keeps them as recorded.")
    ] = 1.0,
    max_wait: Annotated[
        float,
        typer.Option(
            min=0, help="Longer tool waits of a log, mostly for a person, are cut to these seconds."
        ),
    ] = 60.0,
    tool_seconds: Annotated[
        float, typer.Option(min=0, help="What a call takes whose time the log does not have.")
    ] = 0.0,
    dialect: Annotated[
        Literal["session", "chat"],
        typer.Option(
            help="session: agentserve's own API, outputs forced. chat: any OpenAI-compatible "
            "endpoint, the whole history in each request."
        ),
    ] = "session",
    free: Free = False,
    url: Url = None,
    api_key: ApiKeyOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Model of the server that is started ({DEFAULT_MODEL}), or the one that the "
            "endpoint is asked for (the first that it lists)."
        ),
    ] = None,
    extra: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="More fields of each chat request, such as '{\"ignore_eos\": true}'. null leaves "
            'a field out; "{max_tokens}" stands for the turn\'s own number.',
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="REPORT",
            help="Ask for outputs as long as in this report of another replay, instead of a token "
            "per 4 bytes of the log.",
        ),
    ] = None,
    json_path: JsonFile = None,
    accounting: Annotated[
        bool,
        typer.Option(
            "--accounting",
            help="Only print the arithmetic of prefill with and without reuse, on a model of an "
            "engine that needs no weights.",
        ),
    ] = False,
) -> None:
    """Replay an agent's turns over HTTP, each when the one before is done, and report.

    The answers are those of the scenario or log. The tools of a scenario really run, in this
    process; those of a log take as long as they did, and return what they did.
    """
    from agentserve.replay.command import ReplayOptions, run_replay

    run_replay(
        ReplayOptions(
            file=file,
            workload=generate,
            sessions=sessions,
            turns=turns,
            speed=speed,
            max_wait=max_wait,
            tool_seconds=tool_seconds,
            free=free,
            dialect=dialect,
            url=url,
            api_key=api_key,
            model=model,
            extra=extra,
            lengths=lengths,
            json_path=json_path,
            accounting=accounting,
        )
    )


def report(
    first: Annotated[Path, typer.Argument(help="A report of `agentserve replay --json`.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same work.")],
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare them even where the work was not the same.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the reports of two replays of the same work side by side."""
    from rich.console import Console

    from agentserve.replay.sidebyside import compare_reports

    compare_reports((first, second), anyway, as_json, Console())


def demo(
    free: Free = False,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Only so many of the 100 turns.", show_default=False)
    ] = None,
    part: Annotated[
        int | None,
        typer.Option(
            min=1, max=2, help="1: the 100 turns. 2: six agents on KV for two.", show_default="both"
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    json_path: JsonFile = None,
) -> None:
    """Start a server, replay a coding agent's 100 turns on it, and report; then six agents.

    The assistant's words are those of the scenario, decoded step by step as if sampled, so that a
    small model tells a sensible story while the engine does all the work. In part 2 six agents run
    on KV for two, first without a host tier, then with it. --free, --turns and --json are of part
    1, and without --part they run it alone.
    """
    from agentserve.demo import run_demo, run_second_demo

    alone = free or turns is not None or json_path is not None
    if part != 2:
        run_demo(model=model, free=free, turns=turns, json_path=json_path)
    if part == 2 or (part is None and not alone):
        run_second_demo(model)
