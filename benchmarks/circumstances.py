"""When, on what and with which code a benchmark ran: the same for all of them.

Ask before anything is measured: the code is loaded by then, and what happens to the files while
minutes pass does not count.
"""

import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from agentserve.doctor import inspect_machine

ROOT = Path(__file__).resolve().parent.parent


def circumstances(what: str) -> dict[str, Any]:
    """Return the head of a result: what is measured, by which command, when, and on what."""
    machine = msgspec.to_builtins(inspect_machine())
    del machine["cache_directory"]
    return {
        "benchmark": what,
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine,
    }


def command() -> str:
    """Return what was typed, from the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(ROOT):
        script = script.relative_to(ROOT)
    return shlex.join(["python", str(script), *sys.argv[1:]])


def commit() -> str | None:
    """Return the whole hash, with -dirty when tracked files differ from it; None without git."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
