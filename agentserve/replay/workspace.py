"""The real tools of a replay: a temporary directory, and what an agent does in it.

Their results depend on the files alone: no times, no addresses, no paths outside the directory.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
            self.list_files,
            self.read_lines,
            self.search,
            self.replace,
            self.insert,
            self.run,
        )
        return {function.__name__: function for function in functions}

    def list_files(self) -> str:
        """List all files."""
        return "\n".join(name for name, _ in self._listing())

    def read_lines(self, path: str, start: int, count: int) -> str:
        """Read `count` lines of a file from line `start` (the first is 1)."""
        lines = self._read(path).splitlines()
        if not 1 <= start <= len(lines):
            raise ToolError(f"{path} has {len(lines)} lines")
        return "\n".join(lines[start - 1 : start - 1 + max(count, 1)])[:OUTPUT_LIMIT]

    def search(self, text: str) -> str:
        """Find a text in all files."""
        found = [
            f"{name}:{number}: {line.strip()}"
            for name, path in self._listing()
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
            if text in line
        ]
        return "\n".join(found)[:OUTPUT_LIMIT] or "not found"

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

    def run(self, command: str) -> str:
        """Run a Python file of the workspace, as in `python check.py`, and return what it prints.

        No shell and no other program: a model that chooses for itself runs only these files.
        """
        script, *arguments = self._script(command)
        try:
            done = subprocess.run(
                [sys.executable, "-B", script, *arguments],
                cwd=self.root,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=RUN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ToolError(f"{script} was stopped after {RUN_SECONDS:.0f} s") from None
        output = done.stdout.replace(f"{self.root}{os.sep}", "").strip()
        return output[:OUTPUT_LIMIT] or f"exit status {done.returncode}"

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

    def _listing(self) -> list[tuple[str, Path]]:
        paths = sorted(path for path in self.root.rglob("*") if path.is_file())
        return [(path.relative_to(self.root).as_posix(), path) for path in paths]

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


def _environment() -> dict[str, str]:
    """Return the least that a Python process needs: no settings or keys of the user's."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    return kept | {"PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "0"}
