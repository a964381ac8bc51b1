"""What the two peers that serve HTTP have in common: a process, its health, one turn's stream."""

import asyncio
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from peers.completions import Endpoint
from peers.system import (
    Child,
    Heard,
    Histories,
    Places,
    Served,
    SystemFailed,
    environment,
    free_port,
)
from peers.workload import Case, TokenTurn, strangers

START_S = 900.0  # a first start may compile
POLL_S = 0.2


class HttpPeer(ABC):
    """A server in its own environment that takes prompts of token ids."""

    name: str
    path: str  # of the endpoint that completes a prompt

    def __init__(self) -> None:
        self._child: Child | None = None
        self._endpoint: Endpoint | None = None
        self._command: list[str] = []

    @abstractmethod
    def command(self, case: Case, places: Places, port: int) -> list[str]:
        """Return the command line of the server. Raises SystemFailed if it is not installed."""

    @abstractmethod
    def variables(self, case: Case, places: Places) -> dict[str, str]:
        """Return the environment variables that its documentation advises."""

    @abstractmethod
    def body(self, prompt: list[int], output: int) -> dict[str, Any]:
        """Return the request that samples exactly `output` tokens, greedily."""

    @abstractmethod
    def read(self, event: dict[str, Any]) -> tuple[list[int], tuple[int, int] | None]:
        """Return an event's token ids and, where it has them, the prompt's and cached tokens."""

    @abstractmethod
    def version(self, places: Places) -> str:
        """Return which release runs."""

    async def start(self, case: Case, turns: list[list[TokenTurn]], places: Places) -> None:
        """Start the server, wait until it is healthy, run a strange prompt through it."""
        port = free_port()
        self._command = self.command(case, places, port)
        self._version = self.version(places)
        self._histories = Histories(turns)
        self._variables = self.variables(case, places)
        log = places.logs / f"{self.name}.log"
        self._child = Child(self._command, environment(self._variables), log)
        self._endpoint = Endpoint(f"http://127.0.0.1:{port}")
        await self._wait()
        await self._complete(strangers(300), 4, lambda: None)

    def about(self) -> dict[str, Any]:
        """The version, the command line and its variables, without this machine's folders."""
        return {
            "version": self._version,
            "options": [_short(part) for part in self._command],
            "variables": {name: _short(value) for name, value in self._variables.items()},
        }

    async def turn(self, session: int, index: int, heard: Heard) -> Served:
        """Send the whole history, as its clients do, and keep what is sampled."""
        prompt = self._histories.prompt(session, index)
        output = self._histories.turns[session][index].output
        ids, said = await self._complete(prompt, output, heard)
        self._histories.said(session, ids)
        return Served(len(ids), *(said or (None, None)))

    async def stop(self) -> None:
        """End the client and the server."""
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._child is not None:
            await self._child.stop()

    async def _wait(self) -> None:
        assert self._child is not None
        assert self._endpoint is not None
        give_up = time.monotonic() + START_S
        while not await self._endpoint.healthy("/health"):
            self._child.check()
            if time.monotonic() > give_up:
                raise SystemFailed(f"not healthy after {START_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _complete(
        self, prompt: list[int], output: int, heard: Heard
    ) -> tuple[list[int], tuple[int, int] | None]:
        assert self._endpoint is not None
        ids: list[int] = []
        said = None
        async for event in self._endpoint.stream(self.path, self.body(prompt, output)):
            more, counts = self.read(event)
            if more and not ids:
                heard()
            ids += more
            said = counts or said
        return ids, said


def _short(part: str) -> str:
    """Return a word without folders, and so each path of a list of paths."""
    if not part.startswith("/"):
        return part
    return ":".join(Path(path).name for path in part.split(":"))
