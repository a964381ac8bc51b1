"""The nesting of JSON text that arrives in pieces."""

import re

# No group is possessive: before Python 3.11.5 one is matched wrongly (CPython's gh-106052).
_INSIDE = r'[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*'  # of a string
_STRING = re.compile(_INSIDE, re.DOTALL)
# Whole strings, and what is neither bracket nor string.
_PLAIN = re.compile(rf'(?:[\s\w.,:+\-]++|"{_INSIDE}")*', re.DOTALL)
_OPENING = re.compile(r"[{\[]*+")


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
        while True:
            if self._in_string:
                at, state = self._string(text, at)
                if state != "closed":
                    return at, state
            at = _end(_PLAIN, text, at)
            opened = _end(_OPENING, text, at) - at
            at, self._depth = at + opened, self._depth + opened
            if opened:
                continue
            if at == len(text):
                return at, "open"
            if text[at] == '"':
                self._in_string = True
            elif text[at] in "}]":
                self._depth -= 1
                if self._depth <= floor:
                    return at + 1, "closed"
            else:
                return at, "broken"
            at += 1

    def _string(self, text: str, at: int) -> tuple[int, str]:
        """Go on inside a string: to behind its end, "broken" at a character that it cannot have."""
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        at = _end(_STRING, text, at)
        if at == len(text):
            return at, "open"
        if text[at] == "\\":  # the last character
            self._escaped = True
            return at + 1, "open"
        if text[at] != '"':
            return at, "broken"
        self._in_string = False
        return at + 1, "closed"


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where a match of `pattern` at `at` ends."""
    match = pattern.match(text, at)
    return match.end() if match else at
