"""The worker's side of the race's pipe: one JSON object a line, driver -> stdin, stdout -> driver.

    {"op": "start", ...options}                          {"event": "ready", ...}
    {"op": "turn", "turn": 7, "session": 0,              {"event": "first", "turn": 7}
     "new": [ids], "output": 32}                         {"event": "done", "turn": 7, "output": 32}
                                                      or {"event": "failed", "turn": 7, "error": ""}
    the end of the input                                 the worker ends

Runs with the standard library alone, in any peer's environment. What libraries print goes to
stderr: stdout carries the protocol only.
"""

import json
import os
import select
import sys
import threading
from typing import Any, BinaryIO

Message = dict[str, Any]


class Pipe:
    """The two ends of the worker's pipe."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source = source.fileno()
        self._target = target
        self._lock = threading.Lock()
        self._rest = b""
        self.ended = False

    @classmethod
    def standard(cls) -> "Pipe":
        """Return the process's own pipe, and point file descriptor 1 at stderr from here on."""
        own = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        return cls(sys.stdin.buffer, own)

    def say(self, **message: Any) -> None:
        """Send one message; may be called in any thread."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._target.write(line)
            self._target.flush()

    def messages(self, *, wait: bool) -> list[Message]:
        """Return what has arrived; with `wait`, at least one message unless the input ended."""
        found: list[Message] = []
        while not self.ended and (
            (wait and not found) or select.select([self._source], [], [], 0)[0]
        ):
            chunk = os.read(self._source, 1 << 20)
            self.ended = not chunk
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            found += [json.loads(line) for line in lines]
        return found

    def message(self) -> Message:
        """Return the first message, which comes alone. Raises EOFError."""
        for message in self.messages(wait=True):
            return message
        raise EOFError


class Sessions:
    """The token ids of each session, as an application in this process would keep them."""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}

    def prompt(self, session: int, new: list[int]) -> list[int]:
        """Return the session's ids with `new` behind them."""
        log = self._ids.setdefault(session, [])
        log += new
        return log

    def said(self, session: int, ids: list[int]) -> None:
        """Keep what the model sampled."""
        self._ids[session] += ids
