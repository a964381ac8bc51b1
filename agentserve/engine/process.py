"""The engine in its own process: the server's interpreter lock and the step loop stay apart.

The child is `python -m agentserve.engine FD` with one end of a socketpair. Down the socket go the
EngineSpec and then commands, up come batches of events; no pickle. The child exits when the
socket closes, so it never outlives its parent.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from agentserve.config import OPENMP_WAITING, kernel_cache
from agentserve.engine.drive import EngineSpec
from agentserve.engine.frames import FrameDecoder, FrameError, encode_frame
from agentserve.engine.messages import Command, Down, Event, Hint, Promote
from agentserve.engine.supervise import EngineDied, Instance, SupervisedLink

EXIT_S = 5.0
MAX_UNREAD_BYTES = 256 * 1024 * 1024
_READ_BYTES = 256 * 1024
_PATIENT = (Hint, Promote)  # no turn waits for them: they cost none the waking of the engine


class ProcessLink(SupervisedLink):
    """An EngineLink to a child process."""

    @property
    def pid(self) -> int | None:
        """The engine's process id, None while there is no process."""
        return self._instance.pid if isinstance(self._instance, _ProcessInstance) else None

    def kill(self) -> None:
        """Kill the engine process at once (for tests); the link starts another."""
        if isinstance(self._instance, _ProcessInstance):
            self._instance.kill()

    async def _launch(self, spec: EngineSpec) -> Instance:
        return await _spawn(spec)


class _ProcessInstance:
    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._writer = writer
        self._decoder: FrameDecoder[list[Event]] = FrameDecoder(list[Event])
        self._batches: deque[list[Event]] = deque()
        self._held: list[bytes] = []  # frames that the end of this round of the event loop sends

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def send(self, command: Command) -> None:
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.kill()  # it reads before each step: this process is stuck
            return
        self._held.append(encode_frame(command))
        if isinstance(command, _PATIENT):
            if len(self._held) == 1:
                self._loop.call_soon(self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        if self._held and not self._writer.is_closing():
            self._writer.write(b"".join(self._held))
        self._held.clear()

    async def receive(self) -> list[Event]:
        while not self._batches:
            try:
                data = await self._reader.read(_READ_BYTES)
                self._batches.extend(self._decoder.feed(data))
            except FrameError as error:
                self.kill()
                raise EngineDied(f"the engine process sent a {error}") from None
            except OSError:
                data = b""
            if not data:
                raise EngineDied(await self._end())
        batch = self._batches.popleft()
        if isinstance(batch[0], Down):
            await self._end()
            raise EngineDied(batch[0].reason)
        return batch

    async def stop(self) -> None:
        await self._end()

    async def _end(self) -> str:
        """Close the socket, wait for the process, and return how it ended."""
        self._flush()
        self._writer.close()
        try:
            status = await asyncio.to_thread(self._process.wait, EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = await asyncio.to_thread(self._process.wait)
        if status < 0:
            return f"the engine process was killed by {signal.Signals(-status).name}"
        return f"the engine process exited with status {status}"


async def _spawn(spec: EngineSpec) -> _ProcessInstance:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - a vfork; the event loop is not held up
                [sys.executable, "-m", "agentserve.engine", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints must not mix with this process's own output
                pass_fds=[theirs.fileno()],
                env=engine_environment(os.environ, spec.options.get("threads", 0)),
            )
        except BaseException:
            ours.close()
            raise
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        process.kill()
        raise
    writer.write(encode_frame(spec))
    return _ProcessInstance(process, reader, writer)


def engine_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the child's environment: these are read when a library loads, so before exec.

    threads: of torch and numba; 0 takes every core that this process may use. A value that the
    user has set wins, except that an explicit `threads` sets OMP_NUM_THREADS.
    """
    environment = {
        "OMP_NUM_THREADS": str(usable_cores()),
        **OPENMP_WAITING,
        "NUMBA_THREADING_LAYER": "omp",
        "NUMBA_CACHE_DIR": str(kernel_cache()),
        **base,
        "PYTHONSAFEPATH": "1",
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    package_root = str(Path(__file__).parents[2])
    paths = [*filter(None, base.get("PYTHONPATH", "").split(os.pathsep)), package_root]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def usable_cores() -> int:
    """Return how many cores the operating system lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
