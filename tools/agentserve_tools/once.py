"""At most once: what has a key runs a single time, and what came of it is remembered."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from agentserve_tools.types import ToolOutput

_REMEMBERED = 256  # outputs; keys are remembered for good


class Once:
    """Keys that have run, and their outputs. Use it from one event loop."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._running: dict[str, asyncio.Future[ToolOutput]] = {}
        self._outputs: OrderedDict[str, ToolOutput] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._seen

    async def run(self, key: str, work: Callable[[], Awaitable[ToolOutput]]) -> ToolOutput:
        """Await `work` if `key` is new; else return its output, waiting for it while it runs.

        Whoever is cancelled while the work is its own leaves `cancelled` as the output.
        """
        if key in self._running:
            return await asyncio.shield(self._running[key])
        if key in self._seen:
            forgotten = "this call has run before; its result is not kept any more"
            return self._outputs.get(key, ToolOutput(forgotten, "error"))
        self._seen.add(key)
        settled = self._running[key] = asyncio.get_running_loop().create_future()
        output = ToolOutput("the call was cancelled while it ran", "cancelled")
        try:
            output = await work()
        finally:
            settled.set_result(output)
            del self._running[key]
            self._outputs[key] = output
            if len(self._outputs) > _REMEMBERED:
                self._outputs.popitem(last=False)
        return output
