"""A session's tools: functions that run here, and bare descriptions of tools that run elsewhere."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
from agentserve_tools import Approve, Executor, Toolbox, ToolOutput, ToolSpec, tool

from agentserve import wire
from agentserve.client.models import ToolCall
from agentserve.errors import BadToolSchema

__all__ = ["AnyTool", "Tools", "tool"]

AnyTool: TypeAlias = Callable[..., Any] | wire.Tool | Mapping[str, Any]
AnyTools: TypeAlias = Iterable[AnyTool] | Toolbox | Executor


class Tools:
    """What the server is told about the tools, and the functions behind them."""

    def __init__(self, tools: AnyTools = ()) -> None:
        """Take functions and descriptions, a toolbox, or an executor to have limits of one's own.

        A function gives its description itself (see `agentserve_tools.tool`). Raises TypeError or
        ValueError for what is neither a function with a JSON signature nor a description.
        """
        if isinstance(tools, Toolbox):
            tools = Executor(tools)
        if isinstance(tools, Executor):
            self.toolbox, self._executor = tools.toolbox, tools
            self.described = [_describe(spec) for spec in self.toolbox.specs]
            return
        self.toolbox = Toolbox()
        self.described = []
        for one in tools:
            if isinstance(one, wire.Tool):
                self.described.append(one)
            elif isinstance(one, Mapping):
                self.described.append(msgspec.convert({"type": "function", **one}, wire.Tool))
            elif callable(one):
                self.described.append(_describe(self.toolbox.add(one).spec))
            else:
                raise TypeError(f"{one!r} is neither a function nor the description of a tool")
        self._executor = Executor(self.toolbox)

    def starter(
        self, call: ToolCall, approve: Approve | None = None
    ) -> Callable[[], Coroutine[Any, Any, ToolOutput]]:
        """Return what runs `call`, at most once, when it is called in an event loop and awaited."""
        run = self._executor.run
        return partial(run, call.name, call.arguments, call_id=call.call_id, approve=approve)

    def has_run(self, call_id: str) -> bool:
        """Whether the call ran here; its output is known then."""
        return self._executor.has_run(call_id)

    def leave_out(self, refused: BadToolSchema) -> bool:
        """Do without the tool that the server refused, if it came from an MCP server."""
        name = (refused.param or "").removeprefix("tools.").removesuffix(".parameters")
        if not self.toolbox.leave_out(name, refused.message):
            return False
        self.described = [one for one in self.described if one.name != name]
        return True

    def runs_elsewhere(self, call: ToolCall) -> bool:
        """Whether the session has the tool and no function for it is here.

        Another program may have declared it; then the server finds nothing wrong with the call.
        """
        if call.name in self.toolbox:
            return False
        return any(one.name == call.name for one in self.described) or not call.schema_errors

    @property
    def read_only(self) -> set[str]:
        """Names of the functions that change nothing."""
        return {spec.name for spec in self.toolbox.specs if spec.read_only}


def _describe(spec: ToolSpec) -> wire.Tool:
    return wire.Tool(
        name=spec.name,
        parameters=spec.parameters,
        description=spec.description,
        read_only=spec.read_only,
        examples=list(spec.examples),
        expected_ms=spec.expected_ms,
    )
