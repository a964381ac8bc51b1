"""The driver's side of a worker: an engine inside another process, spoken to in JSON lines."""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from peers.system import STOP_S, Heard, SystemFailed, tail

LINE = 1 << 22  # bytes; a prompt's ids take up to 60,000
START_S = 900.0


class WorkerLink:
    """A started worker. `call` runs turns at the same time; `stop` ends it and its group."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._numbers = count(1)
        self._open: dict[int, tuple[Heard, asyncio.Future[dict[str, Any]]]] = {}
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, command: list[str], env: Mapping[str, str], log: Path, **options: Any
    ) -> tuple["WorkerLink", dict[str, Any]]:
        """Start a worker and return it with what it said when it was ready.

        Raises SystemFailed with the end of its log.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                env=dict(env),
                limit=LINE,
                start_new_session=True,
            )
        link = cls(process, log)
        try:
            link._send({"op": "start", **options})
            ready = await asyncio.wait_for(link._line(), START_S)
        except BaseException:
            await link.stop()
            raise
        link._reader = asyncio.ensure_future(link._read())
        return link, ready

    async def call(self, heard: Heard, **message: Any) -> dict[str, Any]:
        """Run one turn and return the worker's last word on it. Raises SystemFailed."""
        number = next(self._numbers)
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._open[number] = (heard, done)
        self._send({"op": "turn", "turn": number, **message})
        return await done

    async def stop(self) -> None:
        """Close the worker's input, wait, and end what is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._reader is not None:
            await asyncio.wait({self._reader})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            status = await self._process.wait()
            raise SystemFailed(f"the worker ended with status {status}: {tail(self._log)}")
        message: dict[str, Any] = json.loads(line)
        return message

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._line())
        except SystemFailed as failed:
            for _, done in self._open.values():
                if not done.done():
                    done.set_exception(failed)

    def _take(self, message: dict[str, Any]) -> None:
        heard, done = self._open[message["turn"]]
        if message["event"] == "first":
            heard()
            return
        del self._open[message["turn"]]
        if done.done():
            return
        if message["event"] == "failed":
            done.set_exception(SystemFailed(message["error"]))
        else:
            done.set_result(message)
