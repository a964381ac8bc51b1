"""agentserve inside an application's process: `Client.embedded`, without HTTP.

The same client, session and engine code as over HTTP; the worker process is the application.
"""

import os
import sys
from typing import Any

import msgspec
from peers.system import BENCHMARKS, Heard, Places, Served
from peers.worker_link import WorkerLink
from peers.workload import Case, TokenTurn

from agentserve.replay.agents import token_bytes


class AgentserveEmbedded:
    """See the module's docstring."""

    name = "agentserve-embedded"

    def __init__(self) -> None:
        self._link: WorkerLink | None = None
        self._about: dict[str, Any] = {}

    async def start(self, case: Case, turns: list[list[TokenTurn]], places: Places) -> None:
        """Start the worker, which loads the model in its own process, and warm it up."""
        model = str(places.weights)
        path = os.pathsep.join(part for part in (str(BENCHMARKS), *sys.path) if part)
        self._link, ready = await WorkerLink.start(
            [sys.executable, "-m", "peers.workers.agentserve_worker"],
            os.environ | {"PYTHONPATH": path},
            places.logs / f"{self.name}.log",
            model=model,
            workload=msgspec.to_builtins(case.workload),
            kv_bytes=case.kv_tokens * token_bytes(model),
            host_bytes=case.host_bytes,
        )
        self._about = {key: value for key, value in ready.items() if key != "event"}

    def about(self) -> dict[str, Any]:
        """What the worker said of itself."""
        return self._about

    async def turn(self, session: int, index: int, heard: Heard) -> Served:
        """Play one turn of the story."""
        assert self._link is not None
        done = await self._link.call(heard, session=session, index=index)
        return Served(done["output"], done["prompt"], done["cached"])

    async def stop(self) -> None:
        """End the worker."""
        if self._link is not None:
            await self._link.stop()
