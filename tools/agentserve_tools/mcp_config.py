"""The configuration file of MCP servers: `{"mcpServers": {name: {command, ...} or {url, ...}}}`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec


class StdioServer(msgspec.Struct, frozen=True):
    """A program that speaks MCP on its standard input and output.

    It gets `env` beside PATH, HOME and the like, and nothing else of this environment.
    """

    command: str
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None


class HttpServer(msgspec.Struct, frozen=True):
    """A server that is reached by streamable HTTP."""

    url: str
    headers: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class UnusableServer:
    """An entry that cannot be used, and why."""

    reason: str


ServerConfig: TypeAlias = StdioServer | HttpServer | UnusableServer


def read_config(file: str | os.PathLike[str]) -> dict[str, ServerConfig]:
    """Return the servers of a file by name, without those that are `disabled`.

    Raises OSError when it cannot be read, ValueError when it is no such file.
    """
    path = Path(file)
    try:
        document = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    entries = document.get("mcpServers") if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise ValueError(  # noqa: TRY004 - of the file, not of an argument
            f'{path} is not of the form {{"mcpServers": {{...}}}}'
        )
    return {name: _server(one) for name, one in entries.items() if not _is_disabled(one)}


def _is_disabled(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("disabled") is True


def _server(entry: Any) -> ServerConfig:
    """Return one entry; keys that are not known are passed over."""
    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        return UnusableServer("it needs either `command` or `url`")
    if "url" in entry and "sse" in (entry.get("type"), entry.get("transport")):
        return UnusableServer("the SSE transport is not supported; use streamable HTTP")
    try:
        if "command" in entry:
            return msgspec.convert(entry, StdioServer)
        return msgspec.convert(entry, HttpServer)
    except msgspec.ValidationError as error:
        return UnusableServer(str(error))
