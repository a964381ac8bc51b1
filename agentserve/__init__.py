"""agentserve: an agent-session runtime for tool-calling loops."""

__version__ = "0.1.0"
