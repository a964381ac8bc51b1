"""Tools of MCP servers: connected in a background loop, and again after a server has gone.

Needs the `mcp` package (`pip install -e '.[mcp]'` in a clone of agentserve).
"""

import asyncio
import atexit
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

try:
    from agentserve_tools.mcp_connection import Connection, ServerFailed, Target
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "httpx2"):
        raise
    raise ImportError(
        "tools of MCP servers need the mcp package: pip install -e '.[mcp]' in agentserve's clone"
    ) from None

from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, CallToolResult, ContentBlock, Tool

from agentserve_tools.background import BackgroundLoop
from agentserve_tools.types import ToolOutput, ToolSpec

_LIST_S = 30.0
_MAX_PAGES = 100
_REASON = 300  # characters
_SESSION_ENDED = "Session terminated"  # what the package makes of HTTP 404: the server began anew
_MAX_DESCRIPTION = 16_384  # characters; what an agentserve server takes

Listed: TypeAlias = tuple[ToolSpec, Callable[..., Awaitable[ToolOutput]]]


class McpConnections:
    """The connections to some MCP servers; usable from every thread and event loop."""

    def __init__(self, servers: Mapping[str, Target]) -> None:
        """Take servers by name, as `mcp_config` reads them, or whatever `mcp.Client` connects to.

        Nothing is connected yet.
        """
        self.failed: dict[str, str] = {}
        self._servers = {name: Connection(name, target) for name, target in servers.items()}
        self._loop = BackgroundLoop("agentserve MCP")
        self._closed = False
        atexit.register(self.close)

    def changed_lists(self) -> dict[str, list[Listed]]:
        """Return the tools of the servers whose list is new; `failed` says who has none and why."""
        return self._loop.submit(self._changed_lists()).result()

    async def _changed_lists(self) -> dict[str, list[Listed]]:
        changed = [one for one in self._servers.values() if one.list_changed]
        lists = await asyncio.gather(*map(self._listed, changed))
        return {
            server.name: found
            for server, found in zip(changed, lists, strict=True)
            if found is not None
        }

    async def _listed(self, server: Connection) -> list[Listed] | None:
        try:
            async with asyncio.timeout(_LIST_S):
                client = await server.client()
                server.list_changed = False
                tools = await _all_tools(client)
        except TimeoutError:
            self.failed[server.name] = f"no answer within {_LIST_S:g} s"
            return None
        except Exception as error:  # also of the package, on a list that is none
            said = " ".join(str(error).split())
            self.failed[server.name] = said[:_REASON] or type(error).__name__
            return None
        self.failed.pop(server.name, None)
        return [(_spec(one), partial(self._call, server, one.name)) for one in tools]

    async def _call(self, server: Connection, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Make one call, from any event loop; cancelling it cancels it in the server."""
        if self._closed:
            return ToolOutput("the connections to MCP servers are closed", "error")
        return await asyncio.wrap_future(self._loop.submit(_call(server, name, arguments)))

    def close(self) -> None:
        """End every connection, and the servers that were started for them."""
        atexit.unregister(self.close)
        if not self._closed:
            self._closed = True
            self._loop.submit(self._leave()).result()
            self._loop.close()

    async def _leave(self) -> None:
        await asyncio.gather(*(server.leave() for server in self._servers.values()))


async def _all_tools(client: Client) -> list[Tool]:
    page = await client.list_tools(cache_mode="refresh")
    tools = list(page.tools)
    for _ in range(_MAX_PAGES):
        if page.next_cursor is None:
            break
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return list({one.name: one for one in tools}.values())  # a name that comes twice is one tool


def _spec(tool: Tool) -> ToolSpec:
    hints = tool.annotations
    return ToolSpec(
        name=tool.name,
        parameters=tool.input_schema,
        description=(tool.description or tool.title or "")[:_MAX_DESCRIPTION],
        read_only=hints is not None and hints.read_only_hint is True,
    )


async def _call(server: Connection, name: str, arguments: dict[str, Any]) -> ToolOutput:
    """Make one call. It is never made twice: who knows what a server that ended did before."""
    try:
        client = await server.client()
    except ServerFailed as failed:
        return ToolOutput(f"the MCP server {server.name} is not there: {failed}", "error")
    try:
        result = await client.call_tool(name, arguments)
    except MCPError as error:
        if error.code != CONNECTION_CLOSED and error.message != _SESSION_ENDED:
            return ToolOutput(f"{error.message} (error {error.code})", "error")
    except OSError:
        pass
    else:
        return _output(result)
    await server.leave()
    lost = f"the connection to the MCP server {server.name} was lost during the call"
    return ToolOutput(f"{lost}; whether it had an effect is not known", "error")


def _output(result: CallToolResult) -> ToolOutput:
    """Return what a model can read of a result: text, else the structured value."""
    text = "\n".join(map(_text, result.content))
    value = text if result.content else result.structured_content
    if value is None:
        value = "[no output]"
    return ToolOutput(value, "error" if result.is_error else "ok")


def _text(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "resource_link":
            return f"[resource {block.name}: {block.uri}]"
        case "resource":
            text = getattr(block.resource, "text", None)
            return f"[resource omitted: {block.resource.uri}]" if text is None else str(text)
        case _:
            return f"[{block.type} omitted]"
