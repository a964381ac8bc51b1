"""The built-in tools of one directory: its files, a shell and Python in it.

The paths of the file tools cannot leave the directory, and programs start with a scrubbed
environment and resource limits. That keeps a confused model from wandering; it is not a security
boundary: a shell command can do whatever the user who runs this process can.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from agentserve_tools.files import Files
from agentserve_tools.output import ASIDE, HeadTail
from agentserve_tools.process import Limits, Surroundings, run_process
from agentserve_tools.registry import tool
from agentserve_tools.types import ToolOutput

_KEPT_ENVIRONMENT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TERM", "TZ", "TMPDIR")


class Workspace(Files):
    """The tools of one directory; give `workspace.tools` to a session."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        timeout_s: float = 60.0,
        max_output: int = 32_000,
        environment: dict[str, str] | None = None,
        limits: Limits | None = None,
        keep_whole: bool = True,
    ) -> None:
        """Work in `root`, which must exist.

        timeout_s: seconds until a program is ended; below the executor's deadline, which would
            also throw away what the program has printed
        max_output: characters kept of a program's output or a file
        environment: variables for programs beside PATH, HOME, the locale and the like
        limits: resource limits of each program
        keep_whole: outputs that are cut name a file that has all of them
        """
        super().__init__(root, max_output=max_output)
        kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        self._given = Surroundings(
            self.root, kept | (environment or {}), limits or Limits(), timeout_s
        )
        self._aside = ASIDE if keep_whole else None

    @property
    def groups(self) -> dict[str, list[Callable[..., Any]]]:
        """The tools by the names under which they are chosen: `files`, `shell`, `python`."""
        return {"files": self.file_tools, "shell": [self.shell], "python": [self.python]}

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All of them."""
        return [one for group in self.groups.values() for one in group]

    @tool(examples=[{"command": "ls -l"}])
    async def shell(self, command: str) -> ToolOutput:
        """Run a shell command and return its output.

        Everything it started is ended with it.

        Args:
            command: what to run

        """
        return await self._run(["/bin/sh", "-c", command])

    @tool(examples=[{"code": "print(6 * 7)"}])
    async def python(self, code: str) -> ToolOutput:
        """Run a Python program and return what it prints.

        Args:
            code: the program

        """
        return await self._run([sys.executable, "-"], stdin=code)

    async def _run(self, command: Sequence[str], stdin: str = "") -> ToolOutput:
        kept = HeadTail(self._max_output, self._aside)
        status = await run_process(command, self._given, kept, stdin)
        output = kept.text().rstrip("\n")
        notes = [f"[ended after {self._given.timeout_s:g} s]"] if status is None else []
        if status:
            notes = [f"[exit status {status}]"]
        text = "\n".join(filter(None, (output, *notes))) or "[no output]"
        return ToolOutput(text, "error" if status is None else "ok", truncated=bool(kept.dropped))
