"""Lines of agents' logs, written by hand."""

import json
from pathlib import Path
from typing import Any


def write(path: Path, *values: Any) -> Path:
    """Write one JSON value a line and return the path; bytes are written as they are."""
    lines = (value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def user(text: Any) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def assistant(text: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message with calls made by `call`."""
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def call(id: str, name: str = "bash", arguments: str = '{"command": "ls"}') -> dict[str, Any]:
    """Return a call; the arguments are JSON in a string, as on the wire."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(id: str, text: Any = "done") -> dict[str, Any]:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": id, "content": text}


SESSION = [
    {"role": "system", "content": "You fix programs."},
    user("What is here?"),
    assistant(None, call("c1")),
    tool("c1", "main.py"),
    assistant("Only main.py is here."),
    user("Thanks."),
    assistant("Good luck with it."),
]
