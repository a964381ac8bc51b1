"""Runs tool calls: bounded in time, output and number; a failure is an answer, not an exception.

Async tools run in the caller's event loop and are really cancelled. A plain function runs in a
thread of its own, and a thread cannot be killed, nor can a coroutine that ignores its cancellation:
after the deadline the caller gets an error, a late result is thrown away, and its place under the
concurrency limits stays taken until it ends.
"""

import asyncio
import contextlib
import contextvars
import inspect
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentserve_tools.once import Once
from agentserve_tools.output import ASIDE, as_text, clip
from agentserve_tools.registry import RegisteredTool, Toolbox
from agentserve_tools.schema import ArgumentError, underlying
from agentserve_tools.types import Approve, ToolOutput

_log = logging.getLogger(__name__)
_MESSAGE_LIMIT = 500  # characters of an exception's text
_NAME_LIMIT = 64  # characters; no tool has a longer name
_UNKNOWN_LIMIT = 2000  # characters: a toolbox may have hundreds of tools
_DURATIONS = 64  # of each tool, the newest
_CLEANUP_S = 3.0  # for what was cancelled to end, its processes too


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that may run: its tool is known and its arguments fit."""

    tool: RegisteredTool
    bound: dict[str, Any]
    deadline_s: float

    @property
    def name(self) -> str:
        return self.tool.spec.name


class Executor:
    """Runs the tools of one toolbox. Use one executor from one event loop."""

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        deadline_s: float = 120.0,
        max_output: int = 32_000,
        max_concurrency: int = 16,
        approve: Approve | None = None,
        keep_whole: bool = True,
    ) -> None:
        """Set the limits of every call.

        deadline_s: seconds from the call to its answer, waiting for a free place included
        max_output: characters of output kept
        max_concurrency: calls that run at once, all tools together
        approve: asked before each call, and not under its deadline; None allows all
        keep_whole: outputs that are cut name a file that has all of them
        """
        self.toolbox = toolbox
        self._deadline_s = deadline_s
        self._max_output = max_output
        self._approve = approve
        self._aside = ASIDE if keep_whole else None
        self._once = Once()
        self._places = asyncio.Semaphore(max_concurrency)
        self._own_places: dict[str, asyncio.Semaphore] = {}
        self._durations: dict[str, deque[int]] = {}
        self._late: set[asyncio.Task[ToolOutput]] = set()  # the event loop itself forgets tasks

    async def run(
        self,
        name: str,
        arguments: Any,
        *,
        call_id: str | None = None,
        deadline_s: float | None = None,
        approve: Approve | None = None,
    ) -> ToolOutput:
        """Run one call and return its answer; only cancellation of the caller raises.

        A `call_id` runs at most once: given again, it answers what came of it then.
        `approve` is asked instead of the executor's own.
        """
        limit = self._deadline_s if deadline_s is None else deadline_s
        work = partial(self._decide, name, arguments, limit, approve or self._approve)
        return await (work() if call_id is None else self._once.run(call_id, work))

    def has_run(self, call_id: str) -> bool:
        """Whether a call of this id has begun here, so that it will not run again."""
        return call_id in self._once

    async def run_all(self, calls: Iterable[tuple[str, Any]]) -> list[ToolOutput]:
        """Run (name, arguments) pairs at the same time; answers come in the order of the calls."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run(name, arguments)) for name, arguments in calls]
        return [task.result() for task in tasks]

    @property
    def durations_ms(self) -> dict[str, list[int]]:
        """How long the newest calls of each tool took, in milliseconds, oldest first."""
        return {name: list(durations) for name, durations in self._durations.items()}

    def expected_ms(self, name: str) -> int | None:
        """Return the median of a tool's durations, or what the tool declares before it has any.

        For `session.hint(expected_ms={call_id: ...})`.
        """
        if durations := self._durations.get(name):
            return round(statistics.median(durations))
        return self.toolbox[name].spec.expected_ms if name in self.toolbox else None

    async def _decide(
        self, name: str, arguments: Any, limit: float, approve: Approve | None
    ) -> ToolOutput:
        """Refuse the call, or run it."""
        if name not in self.toolbox:
            known = ", ".join(self.toolbox) or "none"
            text = f"there is no tool named {_short(name)}; the tools are: {known}"
            return ToolOutput(text[:_UNKNOWN_LIMIT], "error")
        tool = self.toolbox[name]
        try:
            call = _Call(tool, tool.signature.bind(arguments), limit)
        except ArgumentError as error:
            return ToolOutput(f"invalid arguments for {name}: {error}", "error")
        if approve is not None and (refusal := await _refusal(approve, tool, arguments)):
            return refusal
        return await self._timed(call)

    async def _timed(self, call: _Call) -> ToolOutput:
        started = time.monotonic()
        result = await self._by_its_deadline(call)
        duration_ms = round((time.monotonic() - started) * 1000)
        self._durations.setdefault(call.name, deque(maxlen=_DURATIONS)).append(duration_ms)
        output, cut = clip(result.output, self._max_output, self._aside)
        truncated = result.truncated or cut
        return replace(result, output=output, truncated=truncated, duration_ms=duration_ms)

    async def _by_its_deadline(self, call: _Call) -> ToolOutput:
        """Run the call in a task of its own, and wait for that no longer than it may take."""
        task = asyncio.create_task(self._in_its_place(call))
        try:
            await asyncio.wait({task}, timeout=call.deadline_s)
            if task.cancelled():
                return ToolOutput(f"{call.name} was cancelled", "cancelled")
            if task.done():
                return task.result()
            late = f"{call.name} did not finish within {call.deadline_s:g} s"
            await self._cancelled(task)
            return ToolOutput(late, "error")
        except asyncio.CancelledError:
            await self._cancelled(task)
            raise

    async def _cancelled(self, task: asyncio.Task[ToolOutput]) -> None:
        """Cancel a call; one that does not end then goes on without anybody waiting for it."""
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        if not task.cancelling():  # twice would interrupt its cleaning up
            task.cancel()
        await asyncio.wait({task}, timeout=_CLEANUP_S)

    async def _in_its_place(self, call: _Call) -> ToolOutput:
        """Run the call when the limits of its tool and of all tools have room."""
        with contextlib.ExitStack() as places:
            for place in (self._own_place(call), self._places):
                if place is not None:
                    await place.acquire()
                    places.callback(place.release)
            if inspect.iscoroutinefunction(underlying(call.tool.function)):
                return await _awaited(call.tool.function(**call.bound))
            work = partial(_answer, call.tool.function, call.bound)
            result = await _in_thread(work, places.pop_all())
        return await _awaited(result) if inspect.isawaitable(result) else result

    def _own_place(self, call: _Call) -> asyncio.Semaphore | None:
        limit = call.tool.max_concurrency
        if limit is None:
            return None
        return self._own_places.setdefault(call.name, asyncio.Semaphore(limit))


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LIMIT else f"{name[:_NAME_LIMIT]}..."


async def _refusal(approve: Approve, tool: RegisteredTool, arguments: Any) -> ToolOutput | None:
    """Ask whether a call may run; return its answer when it may not."""
    ask = partial(_ask, approve, tool, arguments)
    # An async function only makes its coroutine; a plain one may wait for a person.
    is_async = inspect.iscoroutinefunction(underlying(approve))
    verdict = ask() if is_async else await _in_thread(ask)
    if inspect.isawaitable(verdict):
        try:
            verdict = await verdict
        except Exception as error:
            verdict = _asking_failed(error)
    if verdict is True:
        return None
    reason = "" if verdict is None or verdict is False else f": {as_text(verdict)}"
    return ToolOutput(f"the call of {tool.spec.name} was not allowed{reason}", "cancelled")


def _ask(approve: Approve, tool: RegisteredTool, arguments: Any) -> Any:
    try:
        return approve(tool.spec, arguments)
    except BaseException as error:
        return _asking_failed(error)


def _asking_failed(error: BaseException) -> str:
    _log.warning("the approval of a call failed", exc_info=error)
    return f"asking failed: {type(error).__name__}"


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
    except (Exception, SystemExit, BaseExceptionGroup) as error:
        return _failure(error)


def _as_output(value: Any) -> ToolOutput:
    return value if isinstance(value, ToolOutput) else ToolOutput(value)


def _failure(error: BaseException) -> ToolOutput:
    _log.debug("a tool failed", exc_info=error)
    said = as_text(error)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return ToolOutput(text[:_MESSAGE_LIMIT], "error")


async def _in_thread(call: Callable[[], Any], places: contextlib.ExitStack | None = None) -> Any:
    """Run `call`, which raises nothing, in a thread of its own; then its places are free again.

    The thread is a daemon: one that never returns does not keep the program from exiting.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any) -> None:
        if places is not None:
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
