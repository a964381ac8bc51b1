"""Tools for models: typed Python functions as JSON schemas, and an executor with limits."""

from agentserve_tools.executor import Executor
from agentserve_tools.process import Limits
from agentserve_tools.registry import Toolbox, tool
from agentserve_tools.types import Approve, ToolOutput, ToolSpec, allow_read_only
from agentserve_tools.workspace import Workspace

__all__ = [
    "Approve",
    "Executor",
    "Limits",
    "ToolOutput",
    "ToolSpec",
    "Toolbox",
    "Workspace",
    "allow_read_only",
    "tool",
]
