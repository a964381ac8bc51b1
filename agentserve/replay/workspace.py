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
READ_LINES = 3
CHECKS = "check.py"


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
            timeout_s=RUN_SECONDS,
            max_output=OUTPUT_LIMIT,
            keep_whole=False,
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
            self.read,
            self.replace,
            self.insert,
            self.run,
        )
        return {function.__name__: function for function in functions}

    def read(self, path: str, line: int) -> str:
        """Read three lines of a file from this one (the first is 1)."""
        lines = self._content(path).splitlines()
        if not 1 <= line <= len(lines):
            raise ToolError(f"{path} has {len(lines)} lines")
        return "\n".join(lines[line - 1 : line - 1 + READ_LINES])[:OUTPUT_LIMIT]

    def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        content = self._content(path)
        if (times := content.count(old) if old else 0) != 1:
            raise ToolError(f"found {times} times in {path}, must be once")
        self._inside(path).write_text(content.replace(old, new), encoding="utf-8")
        return "replaced"

    def insert(self, path: str, line: int, text: str) -> str:
        """Insert one or more lines before a line, or after the last one."""
        lines = self._content(path).splitlines()
        if not 1 <= line <= len(lines) + 1:
            raise ToolError(f"{path} has {len(lines)} lines")
        lines.insert(line - 1, text)
        self._inside(path).write_text("\n".join([*lines, ""]), encoding="utf-8")
        return "inserted"

    async def run(self, check: str = "") -> ToolOutput:
        """Run `python check.py` with the names of some checks, or without any for all of them.

        Nothing else can be run: a model that chooses for itself gets no shell.
        """
        self._content(CHECKS)
        words = [sys.executable, "-B", CHECKS, *check.split()]
        done = await self._built_in.shell(shlex.join(words))
        return replace(done, output=done.output.replace(f"{self.root}{os.sep}", ""))

    def _content(self, path: str) -> str:
        inside = self._inside(path)
        if not inside.is_file():
            raise ToolError(f"no such file: {path}")
        return inside.read_text(encoding="utf-8")

    def _inside(self, path: str) -> Path:
        inside = (self.root / path).resolve()
        if not inside.is_relative_to(self.root):
            raise ToolError(f"{path} leaves the workspace")
        return inside
