"""The `agentserve` command."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from agentserve import __version__
from agentserve.cli import agent, inspect, launch, serve, sessions, workload
from agentserve.cli.options import CommandFailed
from agentserve.errors import AgentserveError

EXIT_CODES = "Exit codes: 0 done, 1 it failed (one line on stderr says why), 2 wrong usage."

app = typer.Typer(
    help="Serve tool-calling agent sessions on an open model, and look at what is served.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, summary, codes in (
    (serve.serve, "Serve a model over HTTP.", EXIT_CODES),
    (agent.run, "Let a model do a task with tools.", agent.RUN_EXIT_CODES),
    (agent.chat, "Talk to a model that has tools.", EXIT_CODES),
    (launch.launch, "Start Claude Code or Codex on a running server.", EXIT_CODES),
    (workload.replay, "Replay an agent's turns and report.", EXIT_CODES),
    (workload.report, "Compare the reports of two replays.", EXIT_CODES),
    (workload.demo, "Replay a coding agent's 100 turns and report.", EXIT_CODES),
    (inspect.doctor, "Say whether a model runs on this machine.", EXIT_CODES),
    (sessions.ps, "List the sessions of a running server.", EXIT_CODES),
    (inspect.version, "Print the versions of what is installed.", EXIT_CODES),
):
    app.command(short_help=summary, epilog=codes)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentserve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (default: this process's) and exit with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the program
    try:
        app(arguments, prog_name="agentserve")
    except (CommandFailed, AgentserveError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"agentserve: {reason}\n")
        sys.exit(1)
    sys.exit(0)
