"""Named tools: plain callables, with what the decorator says about them."""

import itertools
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from agentserve_tools.schema import JsonArguments, Signature
from agentserve_tools.types import ToolSpec

if TYPE_CHECKING:
    from agentserve_tools.mcp_servers import Listed, McpConnections

F = TypeVar("F", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INVALID = re.compile(r"[^A-Za-z0-9_-]")
_OPTIONS = "__agentserve_tool__"
_MAX_TOOLS = 128  # of a session; what an agentserve server takes
_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What `@tool` says about a function beyond its signature."""

    name: str | None = None
    read_only: bool = False
    expected_ms: int | None = None
    examples: tuple[dict[str, Any], ...] = ()
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class RegisteredTool:
    """A function with its description for the model and its argument parser."""

    spec: ToolSpec
    function: Callable[..., Any]
    signature: Signature | JsonArguments
    max_concurrency: int | None
    server: str | None = None  # the MCP server that it came from


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *,
    name: str | None = None,
    read_only: bool = False,
    expected_ms: int | None = None,
    examples: Iterable[dict[str, Any]] = (),
    max_concurrency: int | None = None,
) -> Callable[[F], F]: ...


def tool(function: F | None = None, /, **options: Any) -> F | Callable[[F], F]:
    """Mark a function as a tool; it stays the function that it was.

    name: what the model calls it (default: the function's name)
    read_only: it changes nothing, so it may start before the model's turn has ended
    expected_ms: how long it usually takes, in milliseconds
    examples: right calls to show the model: the arguments, or what a user says before the call too,
        as `{"input": "...", "arguments": {...}}`
    max_concurrency: how many calls of it may run at once (default: no limit of its own)
    """
    if "examples" in options:
        options["examples"] = tuple(options["examples"])
    described = ToolOptions(**options)

    def mark(target: F) -> F:
        setattr(target, _OPTIONS, described)
        return target

    return mark if function is None else mark(function)


def free_name(server: str, name: str, taken: Container[str]) -> str:
    """Return a tool name that is valid and free: its own, with the server's, with a number."""
    own, with_server = (_INVALID.sub("_", one)[:64] for one in (name, f"{server}_{name}"))
    if own and own not in taken:
        return own
    if with_server not in taken:
        return with_server
    numbered = (f"{with_server[:60]}_{number}" for number in itertools.count(2))
    return next(one for one in numbered if one not in taken)


def _example_arguments(example: dict[str, Any]) -> Any:
    return example["arguments"] if set(example) == {"input", "arguments"} else example


class Toolbox:
    """Tools by name, in the order in which they were added."""

    def __init__(self, tools: Iterable[Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, RegisteredTool] = {}
        self._connections: McpConnections | None = None
        self._left_out: dict[tuple[str, str], str] = {}
        for one in tools:
            self.add(one)

    @classmethod
    def from_mcp_config(
        cls, file: str | os.PathLike[str], tools: Iterable[Callable[..., Any]] = ()
    ) -> Self:
        """Connect to the servers of `{"mcpServers": {...}}` and add their tools to `tools`.

        Blocks until each server has listed its tools or failed; those that failed are in
        `failed_servers`, and hide nothing of the others. Tools that cannot be used are in
        `left_out`. Close the toolbox to end the connections.
        Raises ImportError without the `mcp` package, OSError or ValueError when the file cannot
        be used.
        """
        from agentserve_tools.mcp_config import read_config
        from agentserve_tools.mcp_servers import McpConnections

        toolbox = cls(tools)
        toolbox.connect(McpConnections(read_config(file)))
        return toolbox

    def connect(self, connections: "McpConnections") -> None:
        """Add the tools of MCP servers; a toolbox has one set of connections at most."""
        if self._connections is not None:
            raise ValueError("the toolbox has its MCP servers already")
        self._connections = connections
        self.refresh()

    @property
    def failed_servers(self) -> dict[str, str]:
        """MCP servers that listed no tools, and why."""
        return dict(self._connections.failed) if self._connections is not None else {}

    @property
    def left_out(self) -> dict[tuple[str, str], str]:
        """Tools of MCP servers that no session has, by (server, tool), and why.

        Those are the tools after the first 128, and those that an agentserve server refused.
        """
        return dict(self._left_out)

    def leave_out(self, name: str, reason: str) -> bool:
        """Do without a tool, if it came from an MCP server; return whether it did."""
        one = self._tools.get(name)
        if one is None or one.server is None:
            return False
        del self._tools[name]
        self._left_out[one.server, name] = reason[:_REASON]
        return True

    def refresh(self) -> bool:
        """Ask those MCP servers for their tools whose list changed; return whether ours did.

        A session keeps the tools that it was told of until `session.update(tools=...)`.
        """
        if self._connections is None:
            return False
        before = self.specs
        for server, tools in self._connections.changed_lists().items():
            self._replace(server, tools)
        return self.specs != before

    def _replace(self, server: str, tools: "Iterable[Listed]") -> None:
        """Have these tools of a server, and no others of it."""
        self._tools = {name: one for name, one in self._tools.items() if one.server != server}
        self._left_out = {key: why for key, why in self._left_out.items() if key[0] != server}
        for spec, function in tools:
            own = replace(spec, name=free_name(server, spec.name, self._tools))
            if len(self._tools) < _MAX_TOOLS:
                self._tools[own.name] = RegisteredTool(own, function, JsonArguments(), None, server)
            else:
                self._left_out[server, own.name] = f"a session has {_MAX_TOOLS} tools at most"

    def close(self) -> None:
        """End the connections to MCP servers, and the servers that were started."""
        if self._connections is not None:
            self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, function: Callable[..., Any]) -> RegisteredTool:
        """Register a plain, decorated or async callable and return what was made of it.

        Raises TypeError for a signature that JSON arguments cannot fill, ValueError for a name
        that is taken or is not 1 to 64 letters, digits, `_` or `-`, and for an example that is
        not a valid call.
        """
        options: ToolOptions = getattr(function, _OPTIONS, ToolOptions())
        name: str = options.name or str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no tool name (1-64 letters, digits, _ or -)")
        if name in self._tools:
            raise ValueError(f"there are two tools named {name}")
        signature = Signature(function)
        for example in options.examples:
            signature.bind(_example_arguments(example))
        spec = ToolSpec(
            name=name,
            parameters=signature.schema,
            description=signature.description,
            read_only=options.read_only,
            expected_ms=options.expected_ms,
            examples=options.examples,
        )
        added = RegisteredTool(spec, function, signature, options.max_concurrency)
        self._tools[name] = added
        return added

    @property
    def specs(self) -> list[ToolSpec]:
        """How each tool is described to the model."""
        return [one.spec for one in self._tools.values()]

    def __getitem__(self, name: str) -> RegisteredTool:
        return self._tools[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)
