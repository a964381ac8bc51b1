"""A peer that runs inside a worker process and keeps its sessions' token ids there."""

from abc import ABC, abstractmethod
from typing import Any

from peers.system import BENCHMARKS, Heard, Places, Served, environment
from peers.worker_link import WorkerLink
from peers.workload import Case, TokenTurn


class TokenWorker(ABC):
    """The driver's side: sends what is new in each turn; the worker answers what it sampled."""

    name: str  # of the environment too
    module: str  # of the worker

    def __init__(self) -> None:
        self._link: WorkerLink | None = None
        self._about: dict[str, Any] = {}

    @abstractmethod
    def options(self, case: Case, places: Places) -> dict[str, object]:
        """Return what the worker starts with, `warm_up` ids included."""

    async def start(self, case: Case, turns: list[list[TokenTurn]], places: Places) -> None:
        """Start the worker in its own environment; it warms itself up."""
        self._turns = turns
        options = self.options(case, places)
        self._link, ready = await WorkerLink.start(
            [str(places.python(self.name)), "-m", self.module],
            environment({"PYTHONPATH": str(BENCHMARKS)}),
            places.logs / f"{self.name}.log",
            **options,
        )
        told = {key: value for key, value in options.items() if key not in ("warm_up", "model")}
        self._about = {key: value for key, value in ready.items() if key != "event"}
        self._about["options"] = told

    def about(self) -> dict[str, Any]:
        """What the worker said of itself, and its options."""
        return self._about

    async def turn(self, session: int, index: int, heard: Heard) -> Served:
        """Run one turn."""
        assert self._link is not None
        turn = self._turns[session][index]
        done = await self._link.call(heard, session=session, new=turn.new, output=turn.output)
        return Served(done["output"], done.get("prompt"), done.get("cached"))

    async def stop(self) -> None:
        """End the worker."""
        if self._link is not None:
            await self._link.stop()
