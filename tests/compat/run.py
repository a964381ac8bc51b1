"""Runs each client against a scripted server and records what was reused: `make compat`.

    python tests/compat/run.py [--environments .compat] [--json FILE] [CLIENT]...

Every client is a program of its own, in its own environment, with a server of its own on a free
port. Requests to anywhere but this machine fail. Exits with 1 when a client did not finish its
task, or computed a token again without a reason.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from cases import CASES, Case
from circumstances import circumstances
from reuse import Step, steps
from serverprocess import ServerProcess

HERE = Path(__file__).resolve().parent
NOWHERE = "http://127.0.0.1:9"  # the discard port: what would leave this machine fails at once
PASSED = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE", "AGENTSERVE_CACHE")


class Failed(Exception):
    """A client did not do what it should; the message says what it did."""


def run(case: Case, environments: Path) -> dict[str, Any]:
    """Run one client; return what is recorded of it. Raises Failed."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="agentserve-compat-") as scratch,
        ServerProcess(HERE / "scripts" / case.script) as server,
    ):
        answers = _drive(case, environments, server.url, Path(scratch))
        if answers != list(case.answers):
            raise Failed(f"it answered {answers}, not {list(case.answers)}")
        turns = server.turns()
        signals = server.signals()
    played = steps(turns)
    _check(case, played)
    return {
        "client": case.name,
        "environment": case.environment,
        "seconds": round(time.monotonic() - began, 1),
        "signals": signals,
        "sessions": len({turn["session"] for turn in turns}),
        "steps": msgspec.to_builtins(played),
    }


def _drive(case: Case, environments: Path, url: str, scratch: Path) -> list[str]:
    environment = _environment(scratch, environments)
    python = sys.executable
    if case.environment:
        python = str(environments / case.environment / "bin" / "python")
    elif "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    command = [python, str(HERE / "clients" / case.driver), url, *case.arguments]
    with subprocess.Popen(
        command,
        cwd=scratch,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=case.seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the client may have started others
            raise
    if process.returncode:
        raise Failed(f"exit code {process.returncode}\n{out[-800:]}{errors[-1600:]}")
    last = out.strip().splitlines()[-1:]
    try:
        return list(json.loads(last[0]))
    except (IndexError, ValueError):
        raise Failed(f"its last line is not its answers: {out[-800:]}") from None


def _environment(scratch: Path, environments: Path) -> dict[str, str]:
    """Return what a client's process sees: a home of its own, and no way out."""
    own = {name: os.environ[name] for name in PASSED if name in os.environ}
    proxies = {f"{kind}_proxy": NOWHERE for kind in ("http", "https", "all")}
    return {
        **own,
        **proxies,
        **{name.upper(): address for name, address in proxies.items()},
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
        "HOME": str(scratch),
        "COMPAT_ENVIRONMENTS": str(environments),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _check(case: Case, played: Sequence[Step]) -> None:
    """Raise Failed when requests are missing or tokens were computed without a reason."""
    if len(played) != case.turns:
        raise Failed(f"it took {len(played)} turns, not {case.turns}: {played}")
    for number, step in enumerate(played, start=1):
        if step.missing or (step.rewritten and not case.rewrites):
            raise Failed(f"turn {number} computes {step.missing} tokens without a reason: {played}")


def main() -> None:
    """Run the clients that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".compat"))
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("client", nargs="*", help="names, or what they begin with")
    chosen = parser.parse_args()
    if chosen.json and chosen.client:
        parser.error("a record is of all clients")
    result = circumstances("what existing clients reuse, against the scripted engine")
    rows, failures = [], []
    for case in CASES:
        if chosen.client and not case.name.startswith(tuple(chosen.client)):
            continue
        try:
            row = run(case, chosen.environments.resolve())
        except (Failed, subprocess.TimeoutExpired, httpx.HTTPError, OSError) as error:
            failures.append(case.name)
            print(f"{case.name}: FAILED: {error}", flush=True)
        else:
            rows.append(row)
            print(_line(row), flush=True)
    if failures:
        sys.exit(f"{len(failures)} of {len(failures) + len(rows)} failed: {', '.join(failures)}")
    if chosen.json:
        result["packages"] = _packages()
        result["clients"] = rows
        chosen.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _line(row: dict[str, Any]) -> str:
    reused = ", ".join(f"{step['cached']}/{step['prompt']}" for step in row["steps"])
    found = ", ".join(f"{count} {name}" for name, count in row["signals"].items())
    where = "" if row["sessions"] == 1 else f", in {row['sessions']} sessions"
    return f"{row['client']}: cached {reused}{where}; found by {found} ({row['seconds']} s)"


def _packages() -> dict[str, list[str]]:
    """Return what is pinned for each environment."""
    from install import CODEX, environments, requirements

    named = [name for name in environments() if name != "npm"]
    return {name: requirements(name).read_text().split() for name in named} | {"npm": [CODEX]}


if __name__ == "__main__":
    main()
