"""What kind of work a tool call is, as a short key under which its durations are learnt.

A shell tool runs `ls` and `make` alike; the key tells them apart by the program, and a fetching
tool by the host. Nothing else of the arguments gets into a key.
"""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

MAX_KEY = 96  # characters
MAX_CLASS = 31  # of them after the tool's name and the colon
_READ = 1000  # characters of an argument that are looked at

_COMMANDS = ("command", "cmd", "script", "shell", "bash", "argv")
_WRAPPERS = frozenset({"sudo", "env", "time", "nohup", "nice", "exec"})
_PREPARES = frozenset({"cd", "export", "set", "source", ".", "pushd", "umask"})
_STEPS = re.compile(r"&&|\|\||[;\n|]")
_ODD = re.compile(r"[^a-z0-9_.+-]+")


def tool_key(name: str, arguments: dict[str, Any]) -> str:
    """Return `name`, or `name:class` where an argument is a command line or a URL."""
    kind = next(filter(None, _classes(arguments)), "")
    key = f"{name}:{kind}" if kind else name
    return key.lower()[:MAX_KEY]


def _classes(arguments: dict[str, Any]) -> Iterator[str]:
    for name in _COMMANDS:
        yield _clean(_program(arguments.get(name)))
    for value in arguments.values():
        if isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")):
            yield _clean(_host(value))


def _clean(word: str) -> str:
    return _ODD.sub("", word.lower())[:MAX_CLASS]


def _program(value: Any) -> str:
    """Return the program of a command line, behind variables, wrappers and changes of directory."""
    if isinstance(value, list):
        value = next((word for word in value if isinstance(word, str)), "")
    if not isinstance(value, str):
        return ""
    first = ""
    for step in _STEPS.split(value[:_READ]):
        words = [word for word in step.split() if "=" not in word and word not in _WRAPPERS]
        program = words[0].rpartition("/")[2] if words else ""
        first = first or program
        if program and program not in _PREPARES:
            return program
    return first


def _host(url: str) -> str:
    try:
        return urlsplit(url[:_READ]).hostname or ""
    except ValueError:
        return ""
