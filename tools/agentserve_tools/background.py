"""An event loop in a thread of its own, for code that has none."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_CLOSE_S = 5.0  # more than a tool's process takes to be ended


class BackgroundLoop:
    """Runs coroutines until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work`; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def start(self, work: Coroutine[Any, Any, T]) -> "Job[T]":
        """Start `work` as a job, which tells when stopped work has really ended."""
        job: Job[T] = Job(self._loop)
        self._loop.call_soon_threadsafe(job.begin, work)
        return job

    def close(self) -> None:
        """Cancel what still runs, wait a while for it, end the thread."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(concurrent.futures.CancelledError):
            self.submit(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Job(Generic[T]):
    """Work in a background loop; `ended` has its result once nothing of it runs any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: concurrent.futures.Future[T] = concurrent.futures.Future()

    def begin(self, work: Coroutine[Any, Any, T]) -> None:
        """Run `work` in the loop, which calls this."""
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._settle)

    def stop(self) -> None:
        """Cancel the work and return at once."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.cancel()
            self.ended.set_running_or_notify_cancel()  # without it `wait` does not see the end
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_CLOSE_S)
    await asyncio.get_running_loop().shutdown_asyncgens()
