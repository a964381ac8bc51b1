"""The engine in a thread of this process: embedded use, tests, simulation."""

import asyncio
import contextlib
import threading
import time

from agentserve.clock import SystemClock
from agentserve.engine.drive import EngineSpec, Inbox, Outbox, run_engine
from agentserve.engine.messages import Command, Down, Event
from agentserve.engine.supervise import EngineDied, Instance, SupervisedLink

JOIN_S = 10.0
# An engine whose steps are short and hold the interpreter's lock gets it back before any other
# thread has woken up for it: one that is this many batches ahead of its reader sleeps after each.
LEAD = 4
GIVE_WAY_S = 0.001


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
        self._ended = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(spec,),
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
        # Not by an executor: it takes no work while the interpreter exits.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), JOIN_S)
            self._thread.join()

    def _run(self, spec: EngineSpec) -> None:
        try:
            run_engine(spec, self._inbox, self._outbox, SystemClock())
        finally:
            self._set(self._ended)

    def _notify(self) -> None:
        self._set(self._arrived)
        if len(self._outbox) > LEAD:
            time.sleep(GIVE_WAY_S)

    def _set(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # the event loop is closed: nobody will ever read
            self._inbox.close()
