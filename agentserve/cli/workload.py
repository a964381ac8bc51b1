"""`agentserve replay | demo`: run a recorded or generated agent against a server and report."""

from pathlib import Path
from typing import Annotated

import typer

from agentserve.cli.options import DEFAULT_MODEL

Url = Annotated[
    str | None,
    typer.Option(
        help="A running server, started with --allow-force unless --free is given. "
        "Without it one is started on --model and stopped afterwards."
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
        typer.Argument(help="A scenario, such as scenarios/coding.toml.", show_default=False),
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
    speed: Annotated[
        float, typer.Option(help="Tool seconds are divided by this; 1 keeps them as recorded.")
    ] = 1.0,
    free: Free = False,
    url: Url = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="AGENTSERVE_API_KEY", help="Key, where the server asks for one."),
    ] = None,
    model: Model = DEFAULT_MODEL,
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

    The tools really run, in this process.
    """
    from agentserve.replay.command import ReplayOptions, run_replay

    run_replay(
        ReplayOptions(
            file=file,
            workload=generate,
            sessions=sessions,
            speed=speed,
            free=free,
            url=url,
            api_key=api_key,
            model=model,
            json_path=json_path,
            accounting=accounting,
        )
    )


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
