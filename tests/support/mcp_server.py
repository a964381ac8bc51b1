"""A real MCP server, made with the official package: imported by tests, or run on stdio."""

import os
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract a number from another."""
    return a - b


def write_note(path: str, text: str) -> str:
    """Append a line to a file."""
    with Path(path).open("a") as file:
        file.write(text + "\n")
    return "written"


async def wait(path: str, seconds: float) -> str:
    """Wait, and write down how that ended."""
    record = anyio.Path(path)
    try:
        await record.write_text("started")
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await record.write_text("cancelled")
        raise
    return "waited"


def picture() -> list[str | Image]:
    """Return text and an image."""
    return ["a dot", Image(data=b"\x89PNG", format="png")]


def point(x: int) -> dict[str, int]:
    """Return a structure."""
    return {"x": x, "y": 2 * x}


def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


def crash() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


def environment() -> str:
    """List the names of the environment."""
    return " ".join(sorted(os.environ))


def make_server() -> MCPServer:
    """Return a server whose tools do what tests need."""
    server = MCPServer("support", log_level="ERROR")

    async def grow(context: Context) -> str:
        """Add a tool to the server."""
        server.add_tool(subtract)
        await context.notify_tools_changed()
        return "there is one more"

    for function in (add, picture, point, environment):
        server.add_tool(function, annotations=ToolAnnotations(read_only_hint=True))
    for function in (wait, fail, crash, grow):
        server.add_tool(function)
    server.add_tool(write_note, name="note.write")
    return server


if __name__ == "__main__":
    make_server().run("stdio")
