"""The nesting of JSON text that arrives in pieces."""

import re

# After whole strings and what is neither bracket nor string: a run of opening brackets, a closing
# one, a string that is not whole, or what JSON has not.
_TOKEN = re.compile(
    r'(?:[\s\w.,:+\-]++|"(?:[^"\\\x00-\x1f]++|\\.)*+")*+'
    r'(?:(?P<open>[{\[]++)|[}\]]|(?P<string>")|(?P<bad>.))',
    re.DOTALL,
)
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\.)*+', re.DOTALL)


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
            match = _TOKEN.match(text, at)
            if match is None:
                return len(text), "open"
            at = match.end()
            kind = match.lastgroup
            if kind == "open":
                self._depth += len(match["open"])
            elif kind == "string":
                self._in_string = True
            elif kind == "bad":
                return at - 1, "broken"
            else:
                self._depth -= 1
                if self._depth <= floor:
                    return at, "closed"

    def _string(self, text: str, at: int) -> tuple[int, str]:
        """Go on inside a string: to behind its end, "broken" at a character that it cannot have."""
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        match = _STRING.match(text, at)
        at = match.end() if match else at
        if at == len(text):
            return at, "open"
        if text[at] == "\\":  # the last character
            self._escaped = True
            return at + 1, "open"
        if text[at] != '"':
            return at, "broken"
        self._in_string = False
        return at + 1, "closed"
