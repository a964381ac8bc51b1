"""The real tools of a replay: a temporary directory, and what an agent does in it.

Their results depend on the files alone: no times, no addresses, no paths outside the directory.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentserve_tools import ToolOutput
from agentserve_tools import Workspace as BuiltIn

RUN_SECONDS = 20.0
OUTPUT_LIMIT = 2000  # characters of one result


class ToolError(Exception):
    """The tool could not do it; the text is meant for the model."""


class Workspace:
    """The story's files in a directory of their own, gone when the context ends."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="agentserve-replay-")
        self.root = Path(self._temporary.name).resolve()
        for name, content in self._files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        self._built_in = BuiltIn(
            self.root,
            shell_timeout_s=RUN_SECONDS,
            max_output=OUTPUT_LIMIT,
            environment={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._temporary.cleanup()

    def tools(self) -> dict[str, Callable[..., Any]]:
        """Return the tools by the names that scenarios use."""
        functions: tuple[Callable[..., Any], ...] = (
            self._built_in.list_files,
            self._built_in.search,
            self.read_lines,
            self.replace,
            self.insert,
            self.run,
        )
        return {function.__name__: function for function in functions}

    def read_lines(self, path: str, start: int, count: int) -> str:
        """Read `count` lines of a file from line `start` (the first is 1)."""
        lines = self._read(path).splitlines()
        if not 1 <= start <= len(lines):
            raise ToolError(f"{path} has {len(lines)} lines")
        return "\n".join(lines[start - 1 : start - 1 + max(count, 1)])[:OUTPUT_LIMIT]

    def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        content = self._read(path)
        if (times := content.count(old) if old else 0) != 1:
            raise ToolError(f"found {times} times in {path}, must be once")
        self._inside(path).write_text(content.replace(old, new), encoding="utf-8")
        return "replaced"

    def insert(self, path: str, line: int, text: str) -> str:
        """Insert text before a line."""
        lines = self._read(path).splitlines(keepends=True)
        if not 1 <= line <= len(lines) + 1:
            raise ToolError(f"{path} has {len(lines)} lines")
        lines.insert(line - 1, text)
        self._inside(path).write_text("".join(lines), encoding="utf-8")
        return "inserted"

    async def run(self, command: str) -> ToolOutput:
        """Run a Python file of the workspace, as in `python check.py`, and return what it prints.

        Nothing else can be run: a model that chooses for itself gets no shell.
        """
        words = [sys.executable, "-B", *self._script(command)]
        done = await self._built_in.shell(shlex.join(words))
        return replace(done, output=done.output.replace(f"{self.root}{os.sep}", ""))

    def _script(self, command: str) -> list[str]:
        """Return the script and its arguments."""
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ToolError(f"cannot read the command: {error}") from None
        if len(words) < 2 or words[0] != "python" or not words[1].endswith(".py"):
            raise ToolError("only `python FILE.py ...` can be run")
        self._read(words[1])
        return words[1:]

    def _read(self, path: str) -> str:
        inside = self._inside(path)
        if not inside.is_file():
            raise ToolError(f"no such file: {path}")
        return inside.read_text(encoding="utf-8")

    def _inside(self, path: str) -> Path:
        inside = (self.root / path).resolve()
        if not inside.is_relative_to(self.root):
            raise ToolError(f"{path} leaves the workspace")
        return inside
