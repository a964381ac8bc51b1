"""The two incremental readers of a call's JSON: its fixed opening, and its brackets."""

import re
from collections.abc import Sequence

import msgspec

SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE_STOP = re.compile(r'["{}\[\]]|[^\s\w.,:+\-]')


class Opening(msgspec.Struct, frozen=True):
    """How `{"name": "...", "arguments": {` goes on; `at` is the place of the last brace.

    state: "complete", "incomplete" (all of the text fits so far) or "other".
    """

    state: str
    name: str | None = None
    at: int = 0


def read_opening(text: str, at: int) -> Opening:
    """Read a call's opening at `text[at]`. What is "complete" or "other" stays so."""
    name: str | None = None
    for expected in (("{",), ('"name"',), (":",), (), (",",), _ARGUMENTS, (":",)):
        at = skip_space(text, at)
        end = _after(text, at, expected) if expected else _after_name(text, at)
        if end is None:
            return Opening("incomplete" if at <= len(text) else "other", name)
        if end < 0:
            return Opening("other", name)
        if not expected:
            name = text[at + 1 : end - 1]
        at = end
    at = skip_space(text, at)
    if at == len(text):
        return Opening("incomplete", name)
    return Opening("complete" if text[at] == "{" else "other", name, at)


_ARGUMENTS = ('"arguments"', '"parameters"')


def skip_space(text: str, at: int) -> int:
    """Return the place of the next character that is not JSON white space."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def _after(text: str, at: int, options: Sequence[str]) -> int | None:
    """Return the place after one of `options`, None when it may still come, -1 when not."""
    for option in options:
        if text.startswith(option, at):
            return at + len(option)
    rest = text[at : at + max(map(len, options))]
    return None if any(option.startswith(rest) for option in options) else -1


def _after_name(text: str, at: int) -> int | None:
    """Return the place after a string without escapes; None and -1 as `_after`."""
    if at == len(text):
        return None
    if text[at] != '"':
        return -1
    match = _STRING_STOP.search(text, at + 1)
    if match is None:
        return None
    return match.end() if match.group() == '"' else -1


class Brackets:
    """Follows the nesting of JSON text that arrives in pieces.

    It checks no more than it must to know where a value ends; a parser checks the rest.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def advance(self, text: str, at: int, floor: int) -> tuple[int, str]:
        """Scan on from `at` and return (where it stopped, why).

        "closed": the nesting came down to `floor`, the bracket is before the place. "broken": the
        character at the place cannot be JSON. "open": the text is used up.
        """
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_STRING_STOP if self._in_string else _OUTSIDE_STOP).search(text, at)
            if match is None:
                return len(text), "open"
            at = match.end()
            if not self._take(match.group()):
                return match.start(), "broken"
            if self._depth == floor and match.group() in "}]":
                return at, "closed"
        return at, "open"

    def _take(self, character: str) -> bool:
        if character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._escaped = character == "\\"
            return self._escaped
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        else:
            return False
        return True
