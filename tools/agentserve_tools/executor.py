"""Runs tool calls: bounded in time, output and number; a failure is an answer, not an exception.

Async tools run in the caller's event loop and are really cancelled. A plain function runs in a
thread of its own, and a thread cannot be killed: after the deadline its caller gets an error, its
late result is thrown away, and its place under the concurrency limits stays taken until it ends.
"""

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from agentserve_tools.output import clip
from agentserve_tools.registry import Toolbox
from agentserve_tools.schema import ArgumentError, underlying
from agentserve_tools.types import ToolOutput

_log = logging.getLogger(__name__)
_MESSAGE_LIMIT = 500  # characters of an exception's text


class Executor:
    """Runs the tools of one toolbox. Use one executor from one event loop."""

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        deadline_s: float = 60.0,
        max_output: int = 32_000,
        max_concurrency: int = 16,
    ) -> None:
        """Set the limits of every call.

        deadline_s: seconds from the call to its answer, waiting for a free place included
        max_output: characters of output kept
        max_concurrency: calls that run at once, all tools together
        """
        self.toolbox = toolbox
        self._deadline_s = deadline_s
        self._max_output = max_output
        self._places = asyncio.Semaphore(max_concurrency)
        self._own_places = {
            name: asyncio.Semaphore(limit)
            for name in toolbox
            if (limit := toolbox[name].max_concurrency) is not None
        }

    async def run(self, name: str, arguments: Any, deadline_s: float | None = None) -> ToolOutput:
        """Run one call and return its answer; only cancellation of the caller raises."""
        started = time.monotonic()
        limit = self._deadline_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit):
                result = await self._call(name, arguments)
        except TimeoutError:
            result = ToolOutput(f"{name} did not finish within {limit:g} s", "error")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            result = ToolOutput(f"{name} was cancelled", "cancelled")
        output, cut = clip(result.output, self._max_output)
        return replace(
            result,
            output=output,
            truncated=result.truncated or cut,
            duration_ms=round((time.monotonic() - started) * 1000),
        )

    async def run_all(self, calls: Iterable[tuple[str, Any]]) -> list[ToolOutput]:
        """Run (name, arguments) pairs at the same time; answers come in the order of the calls."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run(name, arguments)) for name, arguments in calls]
        return [task.result() for task in tasks]

    async def _call(self, name: str, arguments: Any) -> ToolOutput:
        if name not in self.toolbox:
            known = ", ".join(self.toolbox) or "none"
            return ToolOutput(f"there is no tool named {name}; the tools are: {known}", "error")
        tool = self.toolbox[name]
        try:
            bound = tool.signature.bind(arguments)
        except ArgumentError as error:
            return ToolOutput(f"invalid arguments for {name}: {error}", "error")
        with contextlib.ExitStack() as places:
            for place in (self._own_places.get(name), self._places):
                if place is not None:
                    await place.acquire()
                    places.callback(place.release)
            if inspect.iscoroutinefunction(underlying(tool.function)):
                return await _awaited(tool.function(**bound))
            call = partial(_answer, tool.function, bound)
            result = await _in_thread(call, places.pop_all())
        return await _awaited(result) if inspect.isawaitable(result) else result


def _answer(function: Callable[..., Any], bound: dict[str, Any]) -> ToolOutput | Awaitable[Any]:
    """Call a plain function; what it raises, `SystemExit` too, becomes its answer."""
    try:
        value = function(**bound)
    except BaseException as error:
        return _failure(error)
    return value if inspect.isawaitable(value) else _as_output(value)


async def _awaited(pending: Awaitable[Any]) -> ToolOutput:
    try:
        return _as_output(await pending)
    except Exception as error:
        return _failure(error)


def _as_output(value: Any) -> ToolOutput:
    return value if isinstance(value, ToolOutput) else ToolOutput(value)


def _failure(error: BaseException) -> ToolOutput:
    _log.debug("a tool failed", exc_info=error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ToolOutput(text[:_MESSAGE_LIMIT], "error")


async def _in_thread(call: Callable[[], Any], places: contextlib.ExitStack) -> Any:
    """Run `call` in a thread of its own; its places are free again when the thread has ended.

    The thread is a daemon: one that never returns does not keep the program from exiting.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any) -> None:
        places.close()
        if not answer.done():
            answer.set_result(result)

    def work() -> None:
        result = call()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this
            loop.call_soon_threadsafe(settle, result)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), daemon=True).start()
    return await answer
