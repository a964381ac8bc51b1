"""A server of the replay's own: `agentserve serve` as a child process."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, NoReturn

READY = re.compile(r"agentserve is ready: (\S+)")
STOP_SECONDS = 15.0
ERROR_CHARACTERS = 2000


class ServerFailed(OSError):
    """The server ended before it was ready; the message has what it wrote."""


@contextmanager
def own_server(model: str, *options: str) -> Iterator[str]:
    """Serve `model` on a free port with forced outputs allowed, and yield the server's address.

    The server is stopped when the context ends, also by SIGTERM. For the main thread only.
    Raises ServerFailed when it does not start.
    """
    command = [sys.executable, "-m", "agentserve", "serve", model, "--port", "0"]
    command += ["--allow-force", "--log-level", "warning", *options]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops the server
        )
        terminated = signal.signal(signal.SIGTERM, _exit)
        try:
            yield _address(process, errors)
        finally:
            _stop(process)
            signal.signal(signal.SIGTERM, terminated)


def _address(process: "subprocess.Popen[str]", errors: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if ready := READY.search(line):
            return ready[1]
    status = process.wait()
    errors.seek(0)
    written = errors.read()[-ERROR_CHARACTERS:].strip()
    raise ServerFailed(f"the server ended with status {status} before it was ready: {written}")


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind, so that the server is stopped."""
    raise SystemExit(128 + number)


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
