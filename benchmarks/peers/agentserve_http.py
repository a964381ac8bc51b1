"""agentserve over HTTP: `agentserve serve` as its README starts it, the engine in its own process.

Where KV is short it has the case's host memory; else its own default.
"""

from contextlib import ExitStack
from typing import Any

from peers.agents import Agents
from peers.system import Heard, Places, Served
from peers.workload import Case, TokenTurn

import agentserve
from agentserve.client.aio import AsyncClient
from agentserve.replay.agents import token_bytes
from agentserve.replay.generator import generate
from agentserve.replay.server import own_server


class AgentserveHttp:
    """See the module's docstring."""

    name = "agentserve"

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._client: AsyncClient | None = None
        self._options: list[str] = []

    async def start(self, case: Case, turns: list[list[TokenTurn]], places: Places) -> None:
        """Start the server as a child process and warm it up."""
        model = str(places.weights)
        self._options = ["--kv-device", str(case.kv_tokens * token_bytes(model))]
        if case.host_bytes is not None:
            self._options += ["--kv-host", str(case.host_bytes)]
        url = self._stack.enter_context(own_server(model, *self._options))
        self._client = AsyncClient(url)
        self._agents = Agents(self._client, generate(case.workload))
        await self._agents.warm_up()

    def about(self) -> dict[str, Any]:
        """The version and the options of `agentserve serve`."""
        return {"version": agentserve.__version__, "options": self._options}

    async def turn(self, session: int, index: int, heard: Heard) -> Served:
        """Play one turn of the story."""
        return await self._agents.turn(session, index, heard)

    async def stop(self) -> None:
        """Close the client, then the server."""
        if self._client is not None:
            await self._client.close()
        self._stack.close()
