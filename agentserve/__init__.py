"""agentserve: an agent-session runtime for tool-calling loops."""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING

from agentserve import errors

if TYPE_CHECKING:
    from agentserve.client.aio import AsyncClient, AsyncSession
    from agentserve.client.models import ToolDone, ToolStarted, Turn, system, user
    from agentserve.client.sync import Client, Session
    from agentserve.client.tools import tool

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "Session",
    "ToolDone",
    "ToolStarted",
    "Turn",
    "errors",
    "system",
    "tool",
    "user",
]

# The client is loaded when it is first asked for: the server and the engine do without it.
_HOMES = {
    "AsyncClient": "agentserve.client.aio",
    "AsyncSession": "agentserve.client.aio",
    "Client": "agentserve.client.sync",
    "Session": "agentserve.client.sync",
    "ToolDone": "agentserve.client.models",
    "ToolStarted": "agentserve.client.models",
    "Turn": "agentserve.client.models",
    "system": "agentserve.client.models",
    "tool": "agentserve.client.tools",
    "user": "agentserve.client.models",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
