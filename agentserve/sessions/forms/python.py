"""Calls that are Python expressions: `name(key=value, ...)`.

Values are translated to JSON piece by piece; whether the whole is JSON is checked at the end.
"""

import re
from collections.abc import Callable

from agentserve.sessions.forms.reading import INVALID, OPENING, Reading
from agentserve.sessions.forms.values import LITERALS, quote
from agentserve.sessions.forms.window import Markers, Wait, Window, markers

_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,127}", re.ASCII)
_KEY = re.compile(r"[A-Za-z_]\w{0,127}", re.ASCII)
_WORD = re.compile(r"[\w.+\-]{1,512}", re.ASCII)
_SIMPLE = dict(zip("abfnrtv0\\'\"", "\a\b\f\n\r\t\v\0\\'\"", strict=True)) | {"\n": ""}
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_NAME_STOPS = Markers(("(", "<", "\n", ")", "]", "{", '"', "'", ","))
_KEY_STOPS = Markers(("=", "\n", "(", ")", "]", ",", '"', "'"))
_WORD_STOPS = Markers((*" \t\r\n,:()[]{}\"'=",))
_DEPTH = 64


def read_name(window: Window, at: int) -> Wait[tuple[int, str | None]]:
    """Return (offset after the bracket, name) of a call's `name(` at `at`; the name may be None."""
    end, stop = yield from window.seek(at, _NAME_STOPS, OPENING)
    name = window.text[window.at + at : window.at + end].strip(" ")
    return end + 1, name if stop == "(" and _NAME.fullmatch(name) else None


def read_arguments(reading: Reading, name: str, closing: Markers) -> Wait[None]:
    """Read `key=value, ...)` and report the call's end, also when it is broken."""
    parts: list[str] = []

    def put(text: str) -> None:
        parts.append(text)
        reading.sink.call_delta(text)

    put("{")
    if (yield from _Translator(reading, put).arguments()):
        put("}")
        reading.finish(name, "".join(parts))
    else:
        yield from reading.fail_at(name, INVALID, closing)


class _Translator:
    """Takes Python's arguments and puts the JSON of them."""

    def __init__(self, reading: Reading, put: Callable[[str], None]) -> None:
        self._reading = reading
        self._window = reading.window
        self._put = put

    def arguments(self) -> Wait[bool]:
        """Take all arguments and the bracket after them; False where one is not understood."""
        first = True
        while True:
            yield from self._space()
            if (yield from self._window.peek(0)) == ")":
                self._take(1)
                return True
            end, stop = yield from self._window.seek(0, _KEY_STOPS, OPENING)
            key = self._window.text[self._window.at : self._window.at + end].strip(" ")
            if stop != "=" or _KEY.fullmatch(key) is None:
                return False
            self._take(end + 1)
            self._put(("" if first else ", ") + quote(key) + ": ")
            first = False
            if not (yield from self._value()):
                return False
            yield from self._space()
            after = yield from self._window.peek(0)
            if after not in (",", ")"):
                return False
            self._take(int(after == ","))

    def _value(self) -> Wait[bool]:
        """Take one value: tokens until the nesting is back where it was."""
        depth = 0
        while True:
            if (yield from self._space()) and depth:
                self._put(" ")
            char = yield from self._window.peek(0)
            if char in ("'", '"'):
                if not (yield from self._string(char)):
                    return False
            elif depth and char in (",", ":"):
                self._put(self._take(1))
                continue
            elif char in ("[", "{") or (depth and char in ("]", "}")):
                depth += 1 if char in "[{" else -1
                self._put(self._take(1))
            elif not (yield from self._word()):
                return False
            if depth == 0 or depth > _DEPTH:
                return depth == 0

    def _word(self) -> Wait[bool]:
        end, _ = yield from self._window.seek(0, _WORD_STOPS, OPENING)
        word = self._window.text[self._window.at : self._window.at + end]
        if _WORD.fullmatch(word) is None:
            return False
        self._take(end)
        self._put(LITERALS.get(word, word))
        return True

    def _string(self, mark: str) -> Wait[bool]:
        triple = yield from self._window.starts(0, (mark * 3, mark * 2, mark))
        closing = mark * 3 if triple == mark * 3 else mark
        if triple == mark * 2:
            self._take(2)
            self._put('""')
            return True
        self._take(len(closing))
        self._put('"')
        stops = markers(closing, "\\")
        while True:
            found = yield from self._window.until(stops, self._text)
            if found is None:
                return False
            self._take(len(found))
            if found == closing:
                self._put('"')
                return True
            if not (yield from self._escape()):
                return False

    def _escape(self) -> Wait[bool]:
        """Take what follows a backslash."""
        char = yield from self._window.peek(0)
        size = _HEXADECIMAL.get(char, 0)
        yield from self._window.peek(size)
        text = self._take(1 + size)
        if len(text) < 1 + size or not text:
            return False
        if not size:
            self._put(quote(_SIMPLE.get(char, "\\" + char))[1:-1])
            return True
        if re.fullmatch(r"[0-9a-fA-F]+", text[1:]) is None or int(text[1:], 16) > 0x10FFFF:
            return False
        code = int(text[1:], 16)
        surrogate = 0xD800 <= code <= 0xDFFF
        self._put(f"\\u{code:04x}" if surrogate else quote(chr(code))[1:-1])
        return True

    def _text(self, text: str) -> None:
        self._reading.keep(text)
        self._put(quote(text)[1:-1])

    def _take(self, count: int) -> str:
        text = self._window.take(count)
        self._reading.keep(text)
        return text

    def _space(self) -> Wait[bool]:
        """Take white space; return whether there was some."""
        found = False
        while count := (yield from self._window.skip_space(0, OPENING)):
            self._take(count)
            found = True
        return found
