"""Tools for the files of one directory: list, read, search, write, edit; no path leads out."""

import fnmatch
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentserve_tools.output import ASIDE, HeadTail
from agentserve_tools.registry import tool

_SEARCH_FILE_LIMIT = 2_000_000  # bytes; larger files are not searched


class Files:
    """The tools of one directory's files."""

    def __init__(self, root: str | os.PathLike[str], *, max_output: int = 32_000) -> None:
        """Work in `root`, which must exist; keep `max_output` characters of a file that is read."""
        self.root = Path(root).resolve(strict=True)
        self._max_output = max_output

    @property
    def file_tools(self) -> list[Callable[..., Any]]:
        """All that work on files."""
        return [self.list_files, self.read_file, self.search, self.write_file, self.edit_file]

    @tool(read_only=True, examples=[{"pattern": "*.py"}])
    def list_files(self, pattern: str = "*", path: str = ".") -> str:
        """List files below a directory.

        Args:
            pattern: file names to list, such as *.py
            path: directory to start from

        """
        names = [self._relative(file) for file in self._files(path, pattern)]
        return "\n".join(names) or "no files"

    @tool(read_only=True, examples=[{"path": "README.md"}])
    def read_file(self, path: str, first_line: int = 1, max_lines: int = 2000) -> str:
        """Read a text file.

        Args:
            path: the file
            first_line: line to start from, counted from 1
            max_lines: how many lines to read at most

        """
        kept = HeadTail(self._max_output)
        with self._resolve(path, reading=True).open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if number >= first_line + max_lines:
                    break
                if number >= first_line:
                    kept.push(line)
        return kept.text()

    @tool(read_only=True, examples=[{"text": "def main"}])
    def search(self, text: str, pattern: str = "*", path: str = ".", max_matches: int = 100) -> str:
        """Find lines that contain a text (not a regular expression).

        Args:
            text: what to look for
            pattern: file names to look in, such as *.py
            path: directory to start from
            max_matches: how many lines to show at most

        """
        found: list[str] = []
        for file in self._files(path, pattern):
            for number, line in _lines(file):
                if text in line:
                    if len(found) == max_matches:
                        return "\n".join((*found, "... there are more matches"))
                    found.append(f"{self._relative(file)}:{number}: {line.strip()[:300]}")
        return "\n".join(found) or "no matches"

    @tool(examples=[{"path": "notes.txt", "content": "first line\n"}])
    def write_file(self, path: str, content: str) -> str:
        """Create or replace a text file.

        Args:
            path: the file
            content: everything that the file shall contain

        """
        file = self._resolve(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8", newline="")
        return f"wrote {len(content)} characters to {self._relative(file)}"

    @tool(examples=[{"path": "notes.txt", "old": "first", "new": "second"}])
    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file.

        Args:
            path: the file
            old: the text to replace, with enough around it to be unique
            new: what to put in its place

        """
        file = self._resolve(path)
        content = file.read_bytes().decode()
        if (times := content.count(old) if old else 0) != 1:
            raise ValueError(f"the text to replace occurs {times} times in {path}, must be once")
        file.write_text(content.replace(old, new), encoding="utf-8", newline="")
        return f"replaced in {self._relative(file)}"

    def _resolve(self, path: str, reading: bool = False) -> Path:
        """Return the file that `path` names, symbolic links followed.

        Raises PermissionError when that is outside the directory; reading may also go where
        outputs that were too long are kept.
        """
        resolved = (self.root / path).resolve()
        inside = resolved.is_relative_to(self.root) or (reading and ASIDE.holds(resolved))
        if not inside:
            raise PermissionError(f"{path} is outside the working directory")
        return resolved

    def _relative(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def _files(self, path: str, pattern: str) -> Iterator[Path]:
        """Yield regular files in name order; hidden directories and links are passed over."""
        for directory, below, names in os.walk(self._resolve(path)):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for name in sorted(fnmatch.filter(names, pattern)):
                file = Path(directory, name)
                if file.is_file() and not file.is_symlink():
                    yield file


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a text file; nothing of one that is binary, huge or unreadable."""
    try:
        if file.stat().st_size > _SEARCH_FILE_LIMIT:
            return
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return
    yield from enumerate(text.splitlines(), start=1)
