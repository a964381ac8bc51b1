"""`agentserve run | chat`: an agent whose tools run here, and its model here or on a server."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from agentserve.cli.options import DEFAULT_URL, ApiKeyOption, CommandFailed, Json

if TYPE_CHECKING:
    from agentserve_tools import Approve, Executor

    from agentserve import AsyncClient, Turn
    from agentserve.cli.terminal import Questions

GROUPS = ("files", "shell", "python")
_NAMED = 5  # tools of a server that are left out for one reason
UNANSWERED = 3
INTERRUPTED = 130
RUN_EXIT_CODES = (
    "Exit codes: 0 the model answered, 1 it failed (one line on stderr says why), 2 wrong usage, "
    "3 it ended without an answer (turns, tokens or context used up), 130 interrupted."
)


def parse_tools(text: str) -> tuple[str, ...]:
    """Return the names in "shell,files". Raises typer.BadParameter for others."""
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if unknown := [name for name in names if name not in GROUPS]:
        raise typer.BadParameter(f"no tools {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return names


Tools = Annotated[
    Any,
    typer.Option(
        parser=parse_tools,
        metavar="NAME,...",
        help="Built-in tools that the model gets: files, shell, python.",
    ),
]
Mcp = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help='MCP servers whose tools it gets: {"mcpServers": {...}}.'
    ),
]
Directory = Annotated[
    Path,
    typer.Option("--dir", exists=True, file_okay=False, help="Where the built-in tools work."),
]
Approval = Annotated[
    Literal["auto", "ask", "deny"],
    typer.Option(
        help="Calls of tools that may change something: run them, ask on the terminal, or refuse."
    ),
]
Url = Annotated[str | None, typer.Option(help=f"A running server. [{DEFAULT_URL}]")]
Model = Annotated[
    str | None, typer.Option(help="Instead of a server: a model, as for `serve`, in this process.")
]
MaxTurns = Annotated[int, typer.Option(min=1, help="Turns of the model after one message.")]
System = Annotated[str | None, typer.Option(help="System message of a new session.")]
SessionName = Annotated[
    str | None,
    typer.Option(
        "--session", metavar="ID", help="Go on with this session, or give a new one its id."
    ),
]


class Agent:
    """What both commands need: a client, tools with limits, and who allows their calls."""

    def __init__(self, client: "AsyncClient", executor: "Executor", approval: str) -> None:
        self.client = client
        self.executor = executor
        self._approval = approval
        self._told: set[tuple[str, str]] = set()

    def tell_left_out(self) -> None:
        """Say on stderr, once, which tools of MCP servers the session does not have, and why."""
        from agentserve.cli.terminal import printable

        groups: dict[tuple[str, str], list[str]] = {}
        for (server, tool), reason in self.executor.toolbox.left_out.items():
            if (server, tool) not in self._told:
                groups.setdefault((server, " ".join(reason.split())), []).append(tool)
                self._told.add((server, tool))
        for (server, reason), tools in groups.items():
            more = f" and {len(tools) - _NAMED} more" if len(tools) > _NAMED else ""
            names = ", ".join(tools[:_NAMED]) + more
            line = f"agentserve: MCP server {server}: left out {names}: {reason}"
            sys.stderr.write(printable(line) + "\n")

    def approve(self, ask: "Callable[[], Questions]") -> "Approve | None":
        """Return what is asked before each call."""
        from agentserve_tools import allow_read_only

        if self._approval == "auto":
            return None
        return allow_read_only if self._approval == "deny" else ask().approve


def make_agent(  # noqa: PLR0913 - one argument per command line option
    tools: tuple[str, ...],
    mcp: Path | None,
    directory: Path,
    approval: str,
    url: str | None,
    api_key: str | None,
    model: str | None,
) -> Agent:
    """Connect to everything that the options name; MCP servers that fail are told on stderr."""
    if url is not None and model is not None:
        raise typer.BadParameter("--url and --model exclude each other", param_hint="--model")
    from agentserve_tools import Executor, Toolbox, Workspace

    from agentserve import AsyncClient

    groups = Workspace(directory).groups
    functions = [one for name in dict.fromkeys(tools) for one in groups[name]]
    try:
        toolbox = Toolbox.from_mcp_config(mcp, functions) if mcp else Toolbox(functions)
    except ImportError as error:  # the mcp package is an extra
        raise CommandFailed(str(error)) from None
    for name, reason in toolbox.failed_servers.items():
        sys.stderr.write(f"agentserve: MCP server {name} gives no tools: {reason}\n")
    try:
        client = (
            AsyncClient.embedded(model)
            if model is not None
            else AsyncClient(url or DEFAULT_URL, api_key)
        )
    except BaseException:
        toolbox.close()
        raise
    return Agent(client, Executor(toolbox), approval)


def run(  # noqa: PLR0913 - one argument per command line option
    task: Annotated[
        str | None,
        typer.Argument(
            help="What the agent shall do. Left out, --session names one that waits for results.",
            show_default=False,
        ),
    ] = None,
    tools: Tools = "",
    mcp: Mcp = None,
    directory: Directory = Path(),
    approve: Approval = "ask",
    max_turns: MaxTurns = 50,
    url: Url = None,
    api_key: ApiKeyOption = None,
    model: Model = None,
    system: System = None,
    session: SessionName = None,
    as_json: Json = False,
) -> None:
    """Let a model do TASK with tools that run here, until it answers.

    The answer goes to stdout, what the tools do to stderr. The tools can do what you can:
    --approve ask asks before each call that may change something.
    """
    if task is None and session is None:
        raise typer.BadParameter("a task is needed, or --session to go on with", param_hint="TASK")
    agent = make_agent(tools, mcp, directory, approve, url, api_key, model)
    options = {"system": system} if system is not None else {}
    try:
        turn = asyncio.run(_run(agent, task, session, options, max_turns, as_json))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        agent.executor.toolbox.close()
    if turn.stop_reason not in ("end", "stop_sequence"):
        sys.stderr.write(f"agentserve: no answer: {_why(turn, max_turns, agent)}\n")
        raise typer.Exit(UNANSWERED)


async def _run(
    agent: Agent,
    task: str | None,
    name: str | None,
    options: dict[str, Any],
    max_turns: int,
    as_json: bool,
) -> "Turn":
    from agentserve.cli.terminal import Lines, Questions, Screen
    from agentserve.client.models import ToolDone

    screen = Screen(sys.stderr if as_json else sys.stdout, sys.stderr, statistics=False)
    calls: list[ToolDone] = []
    turns: list[str] = []

    def on_event(event: Any) -> None:
        if isinstance(event, ToolDone):
            calls.append(event)
        elif getattr(event, "turn", None) is not None:
            turns.append(event.turn.id)
        screen.on_event(event)

    approve = agent.approve(lambda: Questions(Lines(), sys.stderr))
    async with agent.client as client:
        session = await client.session(
            name, resume=name is not None, tools=agent.executor, **options
        )
        agent.tell_left_out()
        turn = await session.run(
            task, max_turns=max_turns, on_event=on_event, approve=approve, on_pending="cancel"
        )
        if as_json:
            typer.echo(msgspec.json.encode(_document(turn, turns, calls)).decode())
        return turn


def _document(turn: "Turn", turns: list[str], calls: list[Any]) -> dict[str, Any]:
    return {
        "session": turn.wire.session,
        "turns": turns,
        "status": turn.status,
        "stop_reason": turn.stop_reason,
        "text": turn.text,
        "calls": [
            {
                "name": done.call.name,
                "arguments": done.call.arguments,
                "status": done.output.status,
                "output": done.output.output,
                "duration_ms": done.output.duration_ms,
            }
            for done in calls
        ],
        "context": turn.context,
    }


def _why(turn: "Turn", max_turns: int, agent: Agent) -> str:
    toolbox = agent.executor.toolbox
    elsewhere = [
        call.name for call in turn.tool_calls if call.name not in toolbox and not call.schema_errors
    ]
    if elsewhere:
        return f"it calls {elsewhere[0]}, which the session has and which was not given here"
    if turn.stop_reason == "tool_calls":
        return f"after {max_turns} turns it still calls tools; see --max-turns"
    return f"the turn ended as {turn.status}, {turn.stop_reason}"


def chat(  # noqa: PLR0913 - one argument per command line option
    tools: Tools = "",
    mcp: Mcp = None,
    directory: Directory = Path(),
    approve: Approval = "ask",
    max_turns: MaxTurns = 50,
    url: Url = None,
    api_key: ApiKeyOption = None,
    model: Model = None,
    system: System = None,
    session: SessionName = None,
) -> None:
    """Talk to a model that has tools. After each turn: speed, cached tokens by tier, context.

    Ctrl-C cancels what runs, not the session. /help lists the commands.
    """
    from agentserve.cli.repl import Chat

    agent = make_agent(tools, mcp, directory, approve, url, api_key, model)
    options = {"system": system} if system is not None else {}
    try:
        asyncio.run(Chat(agent, max_turns).talk(session, options))
    finally:
        agent.executor.toolbox.close()
