"""The `agentserve` command."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from agentserve.cli import inspect, serve, workload
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
for command in (
    serve.serve,
    workload.replay,
    workload.demo,
    inspect.doctor,
    inspect.ps,
    inspect.version,
):
    app.command(epilog=EXIT_CODES)(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (default: this process's) and exit with its code."""
    try:
        app(arguments, prog_name="agentserve")
    except (CommandFailed, AgentserveError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"agentserve: {reason}\n")
        sys.exit(1)
    sys.exit(0)
