"""`agentserve ps | doctor | version`: look, change nothing."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from agentserve import wire
from agentserve.cli.options import (
    DEFAULT_MODEL,
    DEFAULT_URL,
    CommandFailed,
    DtypeOption,
    Json,
    KvDeviceOption,
    KvHostOption,
    format_size,
    show_progress,
)

if TYPE_CHECKING:
    from agentserve.doctor import Report

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
    """Print the versions of agentserve and of what it stands on."""
    from agentserve.doctor import versions

    found = versions()
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        typer.echo("\n".join(f"{name} {number}" for name, number in found.items()))


def doctor(
    model: Annotated[
        str, typer.Argument(help="As for `serve`; it is fetched and converted as serving would.")
    ] = DEFAULT_MODEL,
    dtype: DtypeOption = "auto",
    kv_device: KvDeviceOption = 0,
    kv_host: KvHostOption = None,
    as_json: Json = False,
) -> None:
    """Say whether MODEL runs on this machine, what it takes and what it leaves for KV.

    The first line is the verdict. Exits with 1 when the model does not run.
    """
    from agentserve.doctor import examine

    report = examine(model, dtype, kv_device, kv_host, show_progress)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        typer.echo("\n".join([verdict(report), *_details(report)]))
    if not report.runs:
        raise typer.Exit(1)


def verdict(report: "Report") -> str:
    """Return the one line that answers whether the model runs."""
    figures = report.figures
    sizes = ""
    if figures is not None:
        sizes = (
            f"weights {format_size(figures.weight_bytes)} ({figures.weight_bytes} bytes, "
            f"{figures.dtype}), KV left for {figures.kv_tokens} tokens"
        )
    if report.runs:
        return f"runs: {report.model}: {sizes}"
    return f"does not run: {report.model}: {report.reason}" + (sizes and f" ({sizes})")


def _details(report: "Report") -> list[str]:
    machine, figures = report.machine, report.figures
    lines: list[tuple[str, str]] = []
    if figures is not None:
        million = figures.parameters / 1e6
        lines += [
            ("model", f"{figures.architecture}, {million:.1f} million parameters"),
            (
                "context",
                f"{figures.max_context} tokens, {figures.kv_token_bytes} bytes of KV per token",
            ),
            (
                "KV",
                f"{figures.kv_tokens} tokens on the device, {figures.host_tokens} in host memory "
                "(on a CPU the same DRAM)",
            ),
        ]
    if report.tool_format is not None:
        lines.append(("tool calls", report.tool_format))
    lines += [("warning", text) for text in report.warnings]
    lines += [
        ("cpu", f"{machine.cpu}, {machine.cores} cores, {' '.join(machine.abilities)}"),
        ("memory", f"{format_size(machine.memory_free)} free of {format_size(machine.memory)}"),
        ("cache", machine.cache_directory),
        ("versions", ", ".join(f"{name} {number}" for name, number in machine.versions.items())),
    ]
    return [f"  {name:<11} {value}" for name, value in lines]


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
