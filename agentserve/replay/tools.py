"""Runs a story's calls: scripted results as written, real tools in the session's workspace."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from agentserve_tools import Executor, Toolbox, ToolOutput

from agentserve.replay.scenario import Call, Scenario
from agentserve.replay.workspace import Workspace

T = TypeVar("T")


async def lasting(seconds: float, work: Awaitable[T]) -> T:
    """Return what `work` gives, after at least so many seconds."""
    started = time.perf_counter()
    result = await work
    await asyncio.sleep(max(seconds - (time.perf_counter() - started), 0.0))
    return result


class StoryTools:
    """The tools of one session. Use it from one event loop."""

    def __init__(self, scenario: Scenario, workspace: Workspace) -> None:
        """Take the real tools of the scenario from the workspace.

        Raises ValueError when the scenario names a real tool that no workspace has.
        """
        functions = workspace.tools()
        names = [tool.name for tool in scenario.tools if tool.real]
        if missing := [name for name in names if name not in functions]:
            raise ValueError(f"no such real tool: {', '.join(missing)}")
        self._executor = Executor(Toolbox(functions[name] for name in names), keep_whole=False)

    async def scripted(self, calls: list[Call]) -> list[ToolOutput]:
        """Run the calls as the story has them, at the same time; results in call order."""
        real = [(call.name, call.arguments) for call in calls if call.result is None]
        outputs = iter(await self._executor.run_all(real))
        return [next(outputs) if call.result is None else ToolOutput(call.result) for call in calls]

    async def free(self, calls: list[tuple[str, Any]]) -> list[ToolOutput]:
        """Run calls that the model chose; unknown tools give error results."""
        return await self._executor.run_all(calls)
