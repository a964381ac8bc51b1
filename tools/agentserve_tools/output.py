"""Bounded tool output: the beginning and the end, and how much is missing between them."""

from collections import deque
from typing import Any

import msgspec


class HeadTail:
    """Collects text in memory bounded by `limit` characters: the first half and the last half."""

    def __init__(self, limit: int) -> None:
        self._head: list[str] = []
        self._head_room = limit - limit // 2
        self._tail: deque[str] = deque()
        self._tail_limit = limit // 2
        self._tail_size = 0
        self.dropped = 0

    def push(self, text: str) -> None:
        """Append `text`, forgetting what falls between head and tail."""
        head, text = text[: self._head_room], text[self._head_room :]
        if head:
            self._head.append(head)
            self._head_room -= len(head)
        if text:
            self._tail.append(text)
            self._tail_size += len(text)
            self._trim()

    def _trim(self) -> None:
        while (excess := self._tail_size - self._tail_limit) > 0:
            oldest = self._tail.popleft()
            if len(oldest) > excess:
                self._tail.appendleft(oldest[excess:])
            gone = min(len(oldest), excess)
            self._tail_size -= gone
            self.dropped += gone

    def text(self) -> str:
        """Return what was kept, with a marker where text is missing."""
        marker = f"\n[... {self.dropped} characters left out ...]\n" if self.dropped else ""
        return "".join((*self._head, marker, *self._tail))


def clip(value: Any, limit: int) -> tuple[Any, bool]:
    """Return (value as JSON-compatible data of at most about `limit` characters, was it cut).

    A value that is no JSON value becomes its `str()`; a structure that is too large becomes text.
    """
    try:
        data = msgspec.to_builtins(value, str_keys=True)
        text = data if isinstance(data, str) else msgspec.json.encode(data).decode()
    except (TypeError, ValueError, RecursionError):
        data = text = str(value)
    if len(text) <= limit:
        return data, False
    kept = HeadTail(limit)
    kept.push(text)
    return kept.text(), True
