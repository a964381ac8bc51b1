"""One scanner for everything that a model says: reasoning, text, and tool calls.

It takes text in pieces of any size and gives the same result for all of them, in linear time: it
never looks back further than a call's opening (`_OPENING` characters), and it skips through text
and strings to the next character that matters.
"""

from collections.abc import Callable, Set
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from agentserve.sessions.brackets import SPACE, Brackets, Opening, read_opening, skip_space
from agentserve.sessions.toolformat import ToolFormat

_OPENING = 512  # characters of a call's opening, white space and tag included
_INVALID = "the call is not valid JSON"


class Sink(Protocol):
    """What the scanner reports to, in order. Positions count characters of the whole stream."""

    def text(self, text: str) -> None:
        """Take more text."""

    def reasoning(self, text: str) -> None:
        """Take more reasoning."""

    def reasoning_end(self, position: int) -> None:
        """Close the reasoning; its closing tag ends before `position`."""

    def call_begin(self, name: str | None) -> None:
        """Open a call; without a name nothing is known before it closes."""

    def call_delta(self, text: str) -> None:
        """Take more of the arguments' JSON of a call that began with its name."""

    def call_done(self, name: str, arguments: dict[str, Any]) -> None:
        """Close the call as complete."""

    def call_broken(self, raw: str, name: str | None, error: str) -> None:
        """Close the call: `raw` was meant as one but cannot be read."""

    def call_end(self, position: int) -> bool:
        """Take note that the call's text ends before `position`; True ends the scan there."""
        ...


class _Call(msgspec.Struct):
    """The call that is being scanned; `name` is known when its arguments are streamed."""

    name: str | None
    brackets: Brackets
    raw: list[str]
    arguments: list[str] = []
    rest: list[str] = []  # what follows the arguments
    arguments_closed: bool = False


class _Mode(Enum):
    LEAD = auto()
    REASONING = auto()
    TEXT = auto()
    OPENING = auto()
    CALL = auto()
    BROKEN = auto()
    AFTER = auto()
    STOPPED = auto()


class Scanner:
    """Scans one message. `names` are the declared tools; without `tools_on` calls are text."""

    def __init__(
        self,
        format: ToolFormat,
        names: Set[str],
        sink: Sink,
        *,
        tools_on: bool = True,
        in_reasoning: bool = False,
    ) -> None:
        self._format = format
        self._names = names
        self._sink = sink
        self._trigger = (format.begin or "{") if tools_on else ""
        self._think, self._unthink = format.reasoning or ("", "")
        self._mode = _Mode.LEAD if self._think else _Mode.TEXT
        if in_reasoning and self._think:
            self._mode = _Mode.REASONING
        self._buffer = ""
        self._at = 0
        self._base = 0  # position of the buffer's first character in the stream
        self.call_start = 0  # where the last call began, or what may become one
        self._blank_line = True  # nothing but white space on this line so far
        self._call = _Call(None, Brackets(0), [])
        self._steps: dict[_Mode, Callable[[], bool]] = {
            _Mode.LEAD: self._lead,
            _Mode.REASONING: self._reason,
            _Mode.TEXT: self._text,
            _Mode.OPENING: self._open,
            _Mode.CALL: self._scan_call,
            _Mode.BROKEN: self._scan_broken,
            _Mode.AFTER: self._after,
            _Mode.STOPPED: lambda: False,
        }

    @property
    def in_reasoning(self) -> bool:
        """Whether reasoning is open."""
        return self._mode is _Mode.REASONING

    @property
    def in_call(self) -> bool:
        """Whether a call is open, or what may become one."""
        return self._mode in (_Mode.OPENING, _Mode.CALL, _Mode.BROKEN)

    def push(self, text: str) -> None:
        """Scan more text."""
        self._buffer = self._buffer[self._at :] + text
        self._base += self._at
        self._at = 0
        while self._steps[self._mode]():
            pass

    def finish(self, error: str) -> None:
        """Report what is held back; an open call is broken, for the reason `error`."""
        rest = self._take(len(self._buffer))
        if self._mode is _Mode.REASONING:
            self._sink.reasoning(rest)
        elif self._mode in (_Mode.LEAD, _Mode.TEXT):
            self._say(rest)
        elif self._mode is _Mode.OPENING:
            body = rest.removeprefix(self._format.begin).lstrip(SPACE)
            name = read_opening(body, 0).name
            if self._format.begin or name is not None:
                self._sink.call_broken(body, name, error)
            else:
                self._say(rest)
        elif self._mode in (_Mode.CALL, _Mode.BROKEN):
            self._sink.call_broken("".join([*self._call.raw, rest]), self._call.name, error)
        self._mode = _Mode.STOPPED

    def _take(self, end: int) -> str:
        text = self._buffer[self._at : end]
        self._at = end
        return text

    def _say(self, text: str) -> None:
        if text:
            line = text[text.rfind("\n") + 1 :]
            self._blank_line = (self._blank_line or "\n" in text) and not line.strip()
            self._sink.text(text)

    def _find(self, needle: str) -> tuple[int, bool]:
        """Return (where `needle` is, True), or (where its beginning might be, False)."""
        found = self._buffer.find(needle, self._at)
        if found >= 0:
            return found, True
        size = len(self._buffer)
        for length in range(min(len(needle) - 1, size - self._at), 0, -1):
            if self._buffer.endswith(needle[:length]):
                return size - length, False
        return size, False

    def _lead(self) -> bool:
        """Find out whether the message begins with reasoning."""
        at = skip_space(self._buffer, self._at)
        begun = self._buffer[at : at + len(self._think)]
        if begun == self._think:
            self._at = at + len(begun)
            self._mode = _Mode.REASONING
        elif self._think.startswith(begun):
            return False
        else:
            self._mode = _Mode.TEXT
        return True

    def _reason(self) -> bool:
        end, found = self._find(self._unthink)
        self._sink.reasoning(self._take(end))
        if found:
            self._at += len(self._unthink)
            self._sink.reasoning_end(self._base + self._at)
            self._mode = _Mode.TEXT
        return found

    def _text(self) -> bool:
        end, found = self._find(self._trigger) if self._trigger else (len(self._buffer), False)
        self._say(self._take(end))
        if found:
            self.call_start = self._base + self._at
            self._mode = _Mode.OPENING
        return found

    def _open(self) -> bool:
        """Decide whether a call begins here. Only the first `_OPENING` characters count."""
        view = self._buffer[self._at : self._at + _OPENING]
        body = skip_space(view, len(self._format.begin))
        opening = read_opening(view, body)
        if opening.state == "incomplete" and len(view) < _OPENING:
            return False
        tagged = bool(self._format.begin) and view.startswith("{", body)
        meant = tagged or opening.name in self._names
        if opening.state == "complete" and (meant or (not self._format.begin and self._blank_line)):
            self._begin(opening, body, opening.at)
        elif meant:
            self._begin(Opening("other"), body, body)
        else:
            self._say(self._take(self._at + len(self._trigger)))
            self._mode = _Mode.TEXT
        return True

    def _begin(self, opening: Opening, body: int, end: int) -> None:
        name = opening.name if opening.state == "complete" else None
        self._sink.call_begin(name)
        raw = self._take(self._at + end)[body:]
        self._call = _Call(name, Brackets(0 if name is None else 1), [raw])
        self._mode = _Mode.CALL

    def _scan_call(self) -> bool:
        call = self._call
        streams = call.name is not None and not call.arguments_closed
        end, state = call.brackets.advance(self._buffer, self._at, 1 if streams else 0)
        text = self._take(end)
        call.raw.append(text)
        if streams:
            call.arguments.append(text)
            if text:
                self._sink.call_delta(text)
        else:
            call.rest.append(text)
        if state == "broken":
            self._mode = _Mode.BROKEN
        elif state == "closed" and streams:
            call.arguments_closed = True
        elif state == "closed":
            self._close()
        return state != "open"

    def _close(self) -> None:
        call = self._call
        raw = "".join(call.raw)
        name, arguments, error = _parse_streamed(call) if call.name else _parse_whole(raw)
        if error or name is None or arguments is None:
            self._sink.call_broken(raw, name, error)
        else:
            self._sink.call_done(name, arguments)
        self._mode = _Mode.AFTER
        if not self._format.end:
            self._end_call()

    def _scan_broken(self) -> bool:
        """Take what is left of a broken call: up to its closing tag, or to the end of the line."""
        closing = self._format.end or "\n"
        end, found = self._find(closing)
        self._call.raw.append(self._take(end))
        if found:
            self._sink.call_broken("".join(self._call.raw).strip(), self._call.name, _INVALID)
            self._at += len(self._format.end)
            self._end_call()
        return found

    def _after(self) -> bool:
        """Skip a call's closing tag, which may be missing."""
        self._at = skip_space(self._buffer, self._at)
        begun = self._buffer[self._at : self._at + len(self._format.end)]
        if begun != self._format.end and self._format.end.startswith(begun):
            return False
        if begun == self._format.end:
            self._at += len(begun)
        self._end_call()
        return True

    def _end_call(self) -> None:
        self._blank_line = True
        stops = self._sink.call_end(self._base + self._at)
        self._mode = _Mode.STOPPED if stops else _Mode.TEXT


def _parse_streamed(call: _Call) -> tuple[str | None, dict[str, Any] | None, str]:
    arguments = _decode("".join(call.arguments))
    if "".join(call.rest).strip(SPACE) != "}":
        return call.name, None, "unexpected text after the arguments"
    return call.name, arguments, "" if arguments is not None else _INVALID


def _parse_whole(raw: str) -> tuple[str | None, dict[str, Any] | None, str]:
    value = _decode(raw)
    if value is None:
        return None, None, _INVALID
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return None, None, "the call has no name"
    if not isinstance(arguments, dict):
        return name, None, "the arguments are not a JSON object"
    return name, arguments, ""


def _decode(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
