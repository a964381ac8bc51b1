"""Tools for working in one directory: files, text search, shell.

The paths of the file tools cannot leave the directory, and the shell starts with a scrubbed
environment. That keeps a confused model from wandering; it is not a security boundary: a shell
command can do whatever the user who runs this process can.
"""

import asyncio
import codecs
import contextlib
import fnmatch
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from agentserve_tools.output import HeadTail
from agentserve_tools.registry import tool
from agentserve_tools.types import ToolOutput

_KEPT_ENVIRONMENT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TERM", "TZ", "TMPDIR")
_TERM_GRACE_S = 1.0  # between SIGTERM and SIGKILL
_DRAIN_S = 0.2  # for output that is still in the pipe when the shell has ended
_SEARCH_FILE_LIMIT = 2_000_000  # bytes; larger files are not searched


class Workspace:
    """The tools of one directory; give `workspace.tools` to a session."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        shell_timeout_s: float = 60.0,
        max_output: int = 32_000,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Work in `root`, which must exist.

        shell_timeout_s: seconds until a command is ended
        max_output: characters kept of a command's output or a file
        environment: variables for the shell beside PATH, HOME, the locale and the like
        """
        self.root = Path(root).resolve(strict=True)
        self._timeout_s = shell_timeout_s
        self._max_output = max_output
        kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        self._environment = kept | (environment or {})

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All of them."""
        return [self.list_files, self.read_file, self.search, self.write_file, self.shell]

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
        with self._resolve(path).open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if number >= first_line + max_lines:
                    break
                if number >= first_line:
                    kept.push(line)
        return kept.text()

    @tool(examples=[{"path": "notes.txt", "content": "first line\n"}])
    def write_file(self, path: str, content: str) -> str:
        """Create or replace a text file.

        Args:
            path: the file
            content: everything that the file shall contain

        """
        file = self._resolve(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        return f"wrote {len(content)} characters to {self._relative(file)}"

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

    @tool(examples=[{"command": "ls -l"}])
    async def shell(self, command: str) -> ToolOutput:
        """Run a shell command and return its output.

        Everything it started is ended with it.

        Args:
            command: what to run

        """
        kept = HeadTail(self._max_output)
        async with _pipe_into(kept) as (write_end, reader):
            process = await asyncio.create_subprocess_shell(
                command,
                cwd=self.root,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
            os.close(write_end)
            timed_out = await _wait(process, self._timeout_s)
            await asyncio.wait({reader}, timeout=_DRAIN_S)
        output = kept.text().rstrip("\n")
        notes = [f"[ended after {self._timeout_s:g} s]"] if timed_out else []
        if process.returncode and not timed_out:
            notes = [f"[exit status {process.returncode}]"]
        text = "\n".join(filter(None, (output, *notes))) or "[no output]"
        return ToolOutput(text, "error" if timed_out else "ok", truncated=bool(kept.dropped))

    def _resolve(self, path: str) -> Path:
        """Return the file that `path` names, symbolic links followed.

        Raises PermissionError when that is outside the directory.
        """
        resolved = (self.root / path).resolve()
        if not resolved.is_relative_to(self.root):
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


@contextlib.asynccontextmanager
async def _pipe_into(kept: HeadTail) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Yield the write end of a pipe, which the caller closes, and the task that reads the pipe.

    Not subprocess.PIPE: waiting for such a process also waits for whoever inherited its pipe.
    """
    read_end, write_end = os.pipe()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb")
    )
    reader = asyncio.create_task(_collect(stream, kept))
    try:
        yield write_end, reader
    finally:
        reader.cancel()
        transport.close()


async def _collect(stream: asyncio.StreamReader, kept: HeadTail) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := await stream.read(65536):
        kept.push(decoder.decode(chunk))
    kept.push(decoder.decode(b"", final=True))


async def _wait(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Wait for the process, then end its group; return whether the time was up."""
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        return True
    finally:
        await _end_group(process)
    return False


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End the process and its group: SIGTERM, then SIGKILL for what is left.

    A grandchild that made a session of its own is not in the group and lives on.
    """
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERM_GRACE_S):
                await process.wait()
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
