"""One program in a process group of its own: limits, a deadline, and nothing left behind."""

import asyncio
import codecs
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentserve_tools import limits as _limits
from agentserve_tools.output import HeadTail

_TERM_GRACE_S = 1.0  # between SIGTERM and SIGKILL
_DRAIN_S = 0.2  # for output that is still in the pipe when the program has ended
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one process (setrlimit(2)); None leaves what the caller has.

    cpu_s: CPU seconds; memory_bytes: address space; file_bytes: size of a file that it writes;
    open_files: descriptors; processes: how many the user may have in all when it starts another
    """

    cpu_s: int | None = 600
    memory_bytes: int | None = 16 * _GIB
    file_bytes: int | None = 2 * _GIB
    open_files: int | None = 1024
    processes: int | None = 4096

    def settings(self) -> list[str]:
        """Return the limits as arguments of `limits.py`; nothing dumps core."""
        values = {
            "cpu": self.cpu_s,
            "as": self.memory_bytes,
            "fsize": self.file_bytes,
            "nofile": self.open_files,
            "nproc": self.processes,
            "core": 0,
        }
        return [f"{name}={value}" for name, value in values.items() if value is not None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a program runs: its directory, its whole environment, its limits, its seconds."""

    directory: Path
    environment: dict[str, str]
    limits: Limits
    timeout_s: float


async def run_process(
    command: Sequence[str], given: Surroundings, output: HeadTail, stdin: str = ""
) -> int | None:
    """Run `command` and return its exit status, None when its time was up.

    What it prints goes to `output`. When it has ended, is out of time or the caller is cancelled,
    its whole process group is ended. A descendant that made a session of its own is not in the
    group and lives on.
    """
    program = [sys.executable, "-I", "-S", str(_limits.__file__)]
    program += [*given.limits.settings(), "--", *command]
    async with _pipe_into(output) as (write_end, reader):
        with tempfile.TemporaryFile() as text:
            text.write(stdin.encode(errors="replace"))
            text.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *program,
                    cwd=given.directory,
                    env=given.environment,
                    stdin=text,
                    stdout=write_end,
                    stderr=write_end,
                    start_new_session=True,
                )
            finally:
                os.close(write_end)
        timed_out = await _wait(process, given.timeout_s)
        await asyncio.wait({reader}, timeout=_DRAIN_S)
    return None if timed_out else process.returncode


@contextlib.asynccontextmanager
async def _pipe_into(kept: HeadTail) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Yield the write end of a pipe, which the caller closes, and the task that reads the pipe.

    Not subprocess.PIPE: waiting for such a process also waits for whoever inherited its pipe.
    """
    read_end, write_end = os.pipe()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb")
    )
    reader = asyncio.create_task(_collect(stream, kept))
    try:
        yield write_end, reader
    finally:
        reader.cancel()
        transport.close()


async def _collect(stream: asyncio.StreamReader, kept: HeadTail) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := await stream.read(65536):
        kept.push(decoder.decode(chunk))
    kept.push(decoder.decode(b"", final=True))


async def _wait(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Wait for the process, then end its group; return whether the time was up."""
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        return True
    finally:
        await _end_group(process)
    return False


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End the process and its group: SIGTERM, then SIGKILL for what is left."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERM_GRACE_S):
                await process.wait()
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
