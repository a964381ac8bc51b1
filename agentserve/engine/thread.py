"""The engine in a thread of this process: embedded use, tests, simulation."""

import asyncio
import threading

from agentserve.clock import SystemClock
from agentserve.engine.drive import EngineSpec, Inbox, Outbox, run_engine
from agentserve.engine.messages import Command, Down, Event
from agentserve.engine.supervise import EngineDied, Instance, SupervisedLink

JOIN_S = 10.0


class ThreadLink(SupervisedLink):
    """An EngineLink to an engine thread."""

    async def _launch(self, spec: EngineSpec) -> Instance:
        return _ThreadInstance(spec)


class _ThreadInstance:
    def __init__(self, spec: EngineSpec) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._inbox = Inbox()
        self._outbox = Outbox(self._notify)
        self._thread = threading.Thread(
            target=run_engine,
            args=(spec, self._inbox, self._outbox, SystemClock()),
            name=f"engine-{spec.incarnation}",
            daemon=True,
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put([command])

    async def receive(self) -> list[Event]:
        while True:
            self._arrived.clear()
            batch = self._outbox.take()
            if batch is None:
                await self._arrived.wait()
            elif isinstance(batch[0], Down):
                raise EngineDied(batch[0].reason)
            else:
                return batch

    async def stop(self) -> None:
        self._inbox.close()
        self._outbox.put_last([Down("the engine is stopped")])
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the event loop is closed: nobody will ever read
            self._inbox.close()
