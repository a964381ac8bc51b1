"""`agentserve ps | doctor | version`: look, change nothing."""

import platform
import sys
import time
from importlib import metadata
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from agentserve import __version__, wire
from agentserve.cli.options import DEFAULT_URL, CommandFailed, Json

PAGE = 100


def ps(
    url: Annotated[str, typer.Option(help="The server's address.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="AGENTSERVE_API_KEY", help="Key, where the server asks for one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the sessions of a running server: tokens used, tokens with KV, last activity."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=10.0) as client:
            sessions = list_sessions(client)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandFailed(
            f"no answer from {url} ({error}); is `agentserve serve` running there?"
        ) from None
    if as_json:
        typer.echo(wire.encode(sessions).decode())
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(sessions, time.time()))


def list_sessions(client: httpx.Client) -> list[wire.SessionInfo]:
    """Return every session that the key may see.

    Raises CommandFailed with the server's own words where it refuses.
    """
    sessions: list[wire.SessionInfo] = []
    after: str | None = None
    while True:
        query = {"limit": str(PAGE)} | ({"after": after} if after else {})
        answer = client.get("/sessions", params=query)
        if answer.status_code != 200:
            raise CommandFailed(_refusal(answer))
        page = msgspec.json.decode(answer.content, type=wire.SessionList)
        sessions += page.sessions
        after = page.next
        if after is None:
            return sessions


def version(as_json: Json = False) -> None:
    """Print the version of agentserve and of what it stands on."""
    versions = {"agentserve": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "xgrammar", "numba"):
        versions[name] = installed(name)
    if as_json:
        typer.echo(msgspec.json.encode(versions).decode())
    else:
        typer.echo("\n".join(f"{name} {number}" for name, number in versions.items()))


def installed(distribution: str) -> str:
    """Return the version of an installed distribution without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _refusal(answer: httpx.Response) -> str:
    try:
        error = msgspec.json.decode(answer.content, type=wire.ErrorAnswer).error
    except msgspec.MsgspecError:
        return f"{answer.url} answered {answer.status_code} and is not an agentserve server"
    return f"{answer.url.host} answered {answer.status_code} {error.code}: {error.message}"


def _table(sessions: list[wire.SessionInfo], now: float) -> Table:
    table = Table("session", "state", box=None, header_style="bold", pad_edge=False)
    for column in ("turns", "tokens", "KV device", "KV host", "last active"):
        table.add_column(column, justify="right")
    for session in sessions:
        table.add_row(
            session.id,
            session.state,
            str(session.turns),
            f"{session.context.used} / {session.context.limit}",
            str(session.kv.device),
            str(session.kv.host),
            f"{_age(now - session.last_active_at / 1000)} ago",
        )
    return table


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
