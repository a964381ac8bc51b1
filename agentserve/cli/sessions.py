"""`agentserve ps`: the sessions of a running server, as a table that fits the screen or as JSON."""

import sys
import time
from typing import Annotated, Literal

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from agentserve import wire
from agentserve.cli.options import (
    DEFAULT_URL,
    ApiKeyOption,
    CommandFailed,
    Json,
    format_size,
    no_answer,
)

PAGE = 100
UNBOUNDED = 10_000  # columns, where the output is no screen
# The columns, and in which order a narrow screen loses them (0: never).
COLUMNS = (
    ("session", 0),
    ("state", 5),
    ("turns", 0),
    ("tokens", 0),
    ("device", 0),
    ("host", 0),
    ("moved", 4),
    ("stall", 3),
    ("last active", 1),
    ("recomputed", 2),
)
_LEAST = {"session": 8, "recomputed": 20}  # characters that these may shrink to
_WORDS = ("session", "state", "recomputed")
_GAP = 2  # between columns


def ps(
    url: Annotated[str, typer.Option(help="The server's address.")] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    as_json: Json = False,
) -> None:
    """List the sessions of a running server: where their KV is, what was moved and recomputed."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=10.0) as client:
            sessions = list_sessions(client)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_answer(url, error) from None
    if as_json:
        typer.echo(wire.encode(sessions).decode())
    else:
        console = Console(width=None if sys.stdout.isatty() else UNBOUNDED, highlight=False)
        console.print(fitting_table(sessions, time.time(), console.width))


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
        try:
            page = msgspec.json.decode(answer.content, type=wire.SessionList)
        except msgspec.DecodeError:
            raise CommandFailed(
                f"{client.base_url} answers, but not as an agentserve server would: look at --url"
            ) from None
        sessions += page.sessions
        after = page.next
        if after is None:
            return sessions


def _refusal(answer: httpx.Response) -> str:
    try:
        error = msgspec.json.decode(answer.content, type=wire.ErrorAnswer).error
    except msgspec.MsgspecError:
        return f"{answer.url} answered {answer.status_code} and is not an agentserve server"
    return f"{answer.url.host} answered {answer.status_code} {error.code}: {error.message}"


def fitting_table(sessions: list[wire.SessionInfo], now: float, width: int) -> Table:
    """Return the table with as many columns as fit `width` characters; no number is ever cut.

    What remains goes to the ids, which are cut, and to the reasons, which take several lines.
    """
    rows = [_cells(session, now) for session in sessions]
    names = [name for name, _ in COLUMNS]
    widths = {name: max([len(name), *(len(row[name]) for row in rows)]) for name in names}
    least = widths | {name: min(widths[name], _LEAST[name]) for name in _LEAST}
    spare = [name for name, dropped in sorted(COLUMNS, key=lambda column: column[1]) if dropped]
    while spare and _total(names, least) > width:
        names.remove(spare.pop(0))
    spare_width = max(0, width - _total(names, least))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        own = widths[name]
        if name in _LEAST:
            own = min(own, least[name] + spare_width)
            spare_width -= own - least[name]
        justify: Literal["left", "right"] = "left" if name in _WORDS else "right"
        folds = name == "recomputed"
        overflow: Literal["fold", "ellipsis"] = "fold" if folds else "ellipsis"
        table.add_column(name, justify=justify, overflow=overflow, no_wrap=not folds, width=own)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _total(names: list[str], widths: dict[str, int]) -> int:
    return sum(widths[name] for name in names) + _GAP * (len(names) - 1)


def _cells(session: wire.SessionInfo, now: float) -> dict[str, str]:
    moved = session.residency.saved_bytes + session.residency.loaded_bytes
    again = ", ".join(f"{part.tokens} {part.reason}" for part in session.usage.recomputed)
    return {
        "session": session.id,
        "state": session.state,
        "turns": f"{session.turns}",
        "tokens": f"{session.context.used}",
        "device": f"{session.kv.device}",
        "host": f"{session.kv.host}",
        "moved": format_size(moved),
        "stall": f"{session.residency.stall_ms / 1000:.1f} s",
        "last active": f"{_age(now - session.last_active_at / 1000)} ago",
        "recomputed": again or "0",
    }


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
