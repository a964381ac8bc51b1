"""What the commands share: options, their values, and the failure that is told in one line."""

import re
import sys
from typing import Annotated, Literal

import typer

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "AGENTSERVE_API_KEY"


class CommandFailed(Exception):
    """The command cannot do its work; the message is one line that says why and what to do."""


def no_answer(url: str, error: Exception) -> CommandFailed:
    """Return the failure of a command that reached no server at `url`."""
    return CommandFailed(f"no answer from {url} ({error}); is `agentserve serve` running there?")


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(?:I?B)?")


def parse_size(text: str | int) -> int:
    """Return the bytes of "512M", "2GiB", "1.5g" or "1048576"; units are powers of 1024.

    Raises typer.BadParameter on anything else.
    """
    match = _SIZE.fullmatch(str(text).strip().upper())
    if match is None or ("." in match[1] and not match[2]):
        raise typer.BadParameter(f"{text!r} is not a size such as 512M, 2GiB or 1048576")
    return int(float(match[1]) * _UNITS[match[2]])


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar=KEY_VARIABLE, help="Key, where the server asks for one."),
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Type of weights and KV; auto is bfloat16."),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Where the model runs; auto is cuda where a GPU can be used, else cpu."),
]
KvDeviceOption = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Memory for KV, such as 512M or 8GiB; 0 takes a share of what is free.",
    ),
]
KvHostOption = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Host memory for KV that leaves the device; 0 is none. Left out, it takes a share "
        "of what is free.",
    ),
]
KvPolicyOption = Annotated[
    Literal["none", "device-lru", "lru+host", "tool-aware"],
    typer.Option(
        help="Whose KV makes room for others: none keeps nothing between turns, device-lru has no "
        "host tier, lru+host moves what was used least recently, tool-aware also weighs how soon "
        "each session's tools will return.",
    ),
]


def format_size(size: int) -> str:
    """Return bytes in the unit that a person would choose, powers of 1024."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def show_progress(done: int, total: int, what: str) -> None:
    """Keep one line on stderr up to date, where somebody can see it."""
    if not sys.stderr.isatty():
        return
    share = f"{100 * done // total:3d}%" if total else ""
    end = "\n" if done >= total else ""
    sys.stderr.write(f"\r{what} {share}\x1b[K{end}")
    sys.stderr.flush()
