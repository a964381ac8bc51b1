"""Tools for models: typed Python functions as JSON schemas, and an executor with limits."""

from agentserve_tools.builtins import Workspace
from agentserve_tools.executor import Executor
from agentserve_tools.registry import Toolbox, tool
from agentserve_tools.types import ToolOutput, ToolSpec

__all__ = ["Executor", "ToolOutput", "ToolSpec", "Toolbox", "Workspace", "tool"]
