"""Bounded tool output: the beginning and the end, and where the whole of it is kept."""

import atexit
import itertools
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

_SLACK = 300  # characters; no more than the marker of a cut, or of one that was made before
_STORED_LIMIT = 64 << 20  # characters of one output


class Aside:
    """A private directory for outputs too long for a model; it goes when the program ends."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def new(self) -> Path:
        """Return the path of an empty file of its own. Raises OSError when it cannot be made."""
        with self._lock:
            if self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix="agentserve-output-")).resolve()
                atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
            path = self._directory / f"{next(self._numbers)}.txt"
        path.touch(mode=0o600, exist_ok=False)
        return path

    def holds(self, path: Path) -> bool:
        """Whether a resolved path lies in the directory."""
        return self._directory is not None and path.is_relative_to(self._directory)


ASIDE = Aside()


class HeadTail:
    """Collects text in memory bounded by `limit` characters: the first half and the last half.

    With `aside`, text that outgrows the limit is also written to a file there, up to 64 Mi
    characters.
    """

    def __init__(self, limit: int, aside: Aside | None = None) -> None:
        self._head: list[str] = []
        self._head_room = limit - limit // 2
        self._tail: deque[str] = deque()
        self._tail_limit = limit // 2
        self._tail_size = 0
        self._aside = aside
        self._stored: Path | None = None
        self._stored_size = 0
        self.dropped = 0

    def push(self, text: str) -> None:
        """Append `text`, forgetting what falls between head and tail."""
        if self._stored is not None:
            self._store(text)
        head, text = text[: self._head_room], text[self._head_room :]
        if head:
            self._head.append(head)
            self._head_room -= len(head)
        if text:
            self._tail.append(text)
            self._tail_size += len(text)
            self._trim()

    def _trim(self) -> None:
        if self._tail_size > self._tail_limit and not self.dropped:
            self._begin_storing()
        while (excess := self._tail_size - self._tail_limit) > 0:
            oldest = self._tail.popleft()
            if len(oldest) > excess:
                self._tail.appendleft(oldest[excess:])
            gone = min(len(oldest), excess)
            self._tail_size -= gone
            self.dropped += gone

    def _begin_storing(self) -> None:
        """Write what was collected so far, while nothing of it is forgotten."""
        if self._aside is not None:
            try:
                self._stored = self._aside.new()
            except OSError:
                return
            self._store("".join((*self._head, *self._tail)))

    def _store(self, text: str) -> None:
        text = text[: _STORED_LIMIT - self._stored_size]
        if self._stored is None or not text:
            return
        try:
            with self._stored.open("a", encoding="utf-8", errors="replace", newline="") as file:
                file.write(text)
        except OSError:  # the disk is full: better no file than one with a hole
            self._stored.unlink(missing_ok=True)
            self._stored = None
        else:
            self._stored_size += len(text)

    def text(self) -> str:
        """Return what was kept, with a marker where text is missing."""
        marker = f"\n[... {self.dropped} characters left out{self._where()} ...]\n"
        return "".join((*self._head, marker if self.dropped else "", *self._tail))

    def _where(self) -> str:
        if self._stored is None:
            return ""
        cut = self._stored_size == _STORED_LIMIT
        part = f"the first {_STORED_LIMIT} characters are" if cut else "the whole is"
        return f"; {part} in {self._stored}"


def as_text(value: Any) -> str:
    """Return `str(value)` as text that can be sent, also where that fails."""
    try:
        text = str(value)
    except Exception:
        text = f"<{type(value).__name__} without a text>"
    return text.encode(errors="replace").decode()


def clip(value: Any, limit: int, aside: Aside | None = None) -> tuple[Any, bool]:
    """Return (value as JSON-compatible data of at most about `limit` characters, was it cut).

    A value that is no JSON value becomes its `str()`; a structure that is too large becomes text.
    What UTF-8 cannot say (file names that are no text) becomes `?`. With `aside`, the whole of what
    is cut is kept there.
    """
    try:
        data = msgspec.to_builtins(value, str_keys=True)
        text = msgspec.json.encode(data).decode()
        text = data if isinstance(data, str) else text
    except Exception:  # whatever the value's own methods raise, too
        data = text = as_text(value)
    if len(text) <= limit + _SLACK:
        return data, False
    kept = HeadTail(limit, aside)
    kept.push(text)
    return kept.text(), True
