"""The nesting of JSON text that arrives in pieces."""

import re

_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE_STOP = re.compile(r'["{}\[\]]|[^\s\w.,:+\-]')


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
