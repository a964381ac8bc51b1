"""`agentserve` as a process, and waiting for what it does."""

import contextlib
import os
import subprocess
import sys
import time


@contextlib.contextmanager
def started(*arguments):
    # A test run in the background ignores SIGINT, and so would what it starts.
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "agentserve", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def command(*arguments, said=""):
    """Run a command to its end; return exit code, stdout, stderr."""
    with started(*arguments) as process:
        out, err = process.communicate(said, timeout=120)
        return process.returncode, out, err


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
