"""The server's end of the seam: starts an engine, notices its death and starts the next one.

    down --start--> starting --Ready--> up --death--> down (after a pause)
                       |
                       +--- the third start in a row that fails ---> failed (final)

It has no task of its own: the one reader of `receive` carries it from state to state.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from typing import Any, Protocol

from agentserve.clock import Clock, SystemClock
from agentserve.config import EngineSettings
from agentserve.engine.drive import EngineSpec
from agentserve.engine.messages import Command, Down, Event, Ready
from agentserve.engine.plan import RunnerInfo
from agentserve.errors import EngineDown

MAX_FAILED_STARTS = 3
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
STABLE_S = 30.0  # an engine that lived this long restarts without a long pause


class EngineDied(Exception):
    """The engine behind an instance is gone; the message is the reason."""


class Instance(Protocol):
    """One life of an engine."""

    def send(self, command: Command) -> None:
        """Queue a command without waiting."""
        ...

    async def receive(self) -> list[Event]:
        """Return the next batch; raises EngineDied."""
        ...

    async def stop(self) -> None:
        """End the engine if it still runs and free what it holds."""
        ...


class SupervisedLink(ABC):
    """An EngineLink over a series of instances.

    `receive` has one caller at a time and may be cancelled and called again. After `close` it
    raises errors.EngineDown. `info` is what the last engine that was up said of its model;
    `failure` says why no engine will be started again.
    """

    def __init__(
        self,
        factory: str,
        options: dict[str, Any],
        settings: EngineSettings,
        clock: Clock | None = None,
    ) -> None:
        self._factory = factory
        self._options = options
        self._settings = settings
        self._clock = clock or SystemClock()
        self._instance: Instance | None = None
        self._up = False
        self._readies = 0
        self._deaths = 0  # in quick succession
        self._failed_starts = 0  # in a row
        self._ready_at = self._clock.monotonic()
        self._start_at = self._clock.monotonic()
        self._last_event = self._clock.monotonic()
        self._closed = asyncio.Event()
        self.info: RunnerInfo | None = None
        self.failure: str | None = None

    @abstractmethod
    async def _launch(self, spec: EngineSpec) -> Instance:
        """Start an engine; it says Ready once it is built."""

    def send(self, command: Command) -> None:
        """Queue a command; never blocks. Dropped while the engine is not up."""
        if self._up and self._instance is not None:
            self._instance.send(command)

    async def receive(self) -> list[Event]:
        """Return the next batch of events, starting the engine when there is none.

        A death is a batch with one Down. When the engine cannot be started, `failure` says why
        and nothing more comes until `close`.
        """
        if self.failure is not None:
            await self._closed.wait()
        instance = self._instance or await self._start()
        try:
            batch = await instance.receive()
        except EngineDied as death:
            self._check_open()
            return [self._record_death(str(death))]
        self._record(batch)
        return batch

    async def close(self) -> None:
        """Stop the engine for good."""
        self._closed.set()
        self._up = False
        if self._instance is not None:
            await self._instance.stop()
            self._instance = None

    def last_event_age(self) -> float:
        """Return the seconds since the last batch was received: the age of the heartbeat."""
        return self._clock.monotonic() - self._last_event

    def restart_in(self) -> float:
        """Return the seconds until the next start may begin; 0 when nothing has died."""
        return max(0.0, self._start_at - self._clock.monotonic())

    async def _start(self) -> Instance:
        if not self._closed.is_set() and (pause := self.restart_in()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), pause)
        self._check_open()
        spec = EngineSpec(self._factory, self._options, self._settings, self._readies + 1)
        instance = await self._launch(spec)
        self._instance = instance
        if self._closed.is_set():
            await self.close()
        self._check_open()
        return instance

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise EngineDown("the engine is stopped")

    def _record(self, batch: list[Event]) -> None:
        self._last_event = self._clock.monotonic()
        if isinstance(batch[0], Ready):
            self.info = batch[0].info
            self._up = True
            self._readies += 1
            self._failed_starts = 0
            self._ready_at = self._last_event

    def _record_death(self, reason: str) -> Down:
        now = self._clock.monotonic()
        if not self._up:
            self._failed_starts += 1
        elif now - self._ready_at >= STABLE_S:
            self._deaths = 0
        self._up = False
        self._instance = None
        self._start_at = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 4**self._deaths)
        self._deaths += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            reason = f"the engine failed to start {self._failed_starts} times: {reason}"
            self.failure = reason
        return Down(reason)
