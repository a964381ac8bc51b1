"""What a section has measured so far, in a file at all times."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Report:
    """A dictionary that is written out at every change, and the time that is left."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._deadline = time.monotonic() + seconds
        self._values: dict[str, Any] = {}

    @property
    def values(self) -> dict[str, Any]:
        """What has been measured so far."""
        return self._values

    @property
    def problems(self) -> dict[str, str]:
        """What went wrong, by part; empty if the section has passed."""
        return self._values.get("problems", {})

    def put(self, **values: Any) -> None:
        self._values.update(values)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._values, indent=2) + "\n")
        partial.replace(self._path)

    def problem(self, part: str, text: str) -> None:
        """Record that `part` failed; the section goes on and counts as failed."""
        self.put(problems=self.problems | {part: text})

    def left(self) -> float:
        """Seconds until the section should have ended."""
        return self._deadline - time.monotonic()

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """Record what `work` returns as `name`, with its seconds, or that it raised."""
        start = time.monotonic()
        try:
            self.put(**{name: work()})
        except Exception:
            self.problem(name, traceback.format_exc())
        seconds = self._values.get("part_seconds", {})
        self.put(part_seconds=seconds | {name: round(time.monotonic() - start, 2)})
