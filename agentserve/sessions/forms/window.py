"""Text that arrives in pieces, for readers that are generators: they yield when they need more.

Offsets count from the first character that was not taken, and stay valid across a yield. `visited`
counts the characters that were looked at, so that tests can bound the work.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]

SPACE = " \t\r\n"
SPACES = r"[ \t\r\n]*+"  # as a pattern
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


class Markers:
    """A set of strings to look for; `follows` are patterns of what must come after some of them.

    Such a pattern must match whatever may still become what is wanted once more text comes.
    """

    def __init__(self, texts: Iterable[str], follows: Mapping[str, str] | None = None) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        after = {text: f"(?={pattern})" for text, pattern in (follows or {}).items()}
        options = [re.escape(text) + after.get(text, "") for text in self.texts]
        self._pattern = re.compile("|".join(options) or "(?!)")
        self._heads = {text[:size] for text in self.texts for size in range(1, len(text))}
        self._firsts = {text[0] for text in self.texts if len(text) > 1}
        self._longest = max(map(len, self.texts), default=0)

    def search(self, text: str, at: int, limit: int | None = None) -> re.Match[str] | None:
        """Return the first of the strings that begins from `at` on, at most `limit` on."""
        if limit is None:
            return self._pattern.search(text, at)
        return self._pattern.search(text, at, at + limit + self._longest)

    def begun(self, text: str, at: int) -> int:
        """Return where, from `at` on, one of the strings may have begun that is cut off."""
        size = len(text)
        for start in range(max(at, size - self._longest + 1), size):
            if text[start] in self._firsts and text[start:] in self._heads:
                return start
        return size


@cache
def markers(*texts: str) -> Markers:
    """Return the markers of a form's few constant sets, made once."""
    return Markers(texts)


def begun(*parts: str, rest: str = "") -> str:
    """Return a pattern of `parts` one after the other, of which the text may end after any."""
    for part in reversed(parts):
        rest = rf"(?:\Z|{part}{rest})"
    return rest


class Window:
    """The text that is not taken yet. After `end`, `ended` is set and `error` says why."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.error = ""
        self.visited = 0
        self._base = 0  # position of the first character of `text` in the stream

    @property
    def position(self) -> int:
        """Position in the stream of the next character."""
        return self._base + self.at

    def push(self, text: str) -> None:
        """Add text."""
        self.text = self.text[self.at :] + text
        self._base += self.at
        self.at = 0

    def end(self, error: str) -> None:
        """Say that nothing comes any more; what is cut off failed because of `error`."""
        self.ended, self.error = True, error

    def take(self, count: int) -> str:
        """Take the next `count` characters."""
        text = self.text[self.at : self.at + count]
        self.at += len(text)
        return text

    def until(self, markers: Markers, give: Callable[[str], None]) -> Wait[str | None]:
        """Give the text before the first marker; return the marker, or None at the end."""
        while True:
            match, end = self._first(markers, 0)
            if text := self.take(end):
                give(text)
            if match or self.ended:
                return match.group() if match else None
            yield

    def free(self, offset: int, markers: Markers) -> int:
        """Return the offset up to which what is there from `offset` on has no marker."""
        return self._first(markers, offset)[1]

    def _first(self, markers: Markers, offset: int) -> tuple[re.Match[str] | None, int]:
        """Return the first marker, and the offset where it, or what may become one, begins."""
        match = markers.search(self.text, self.at + offset)
        end = match.start() if match else len(self.text)
        self.visited += end - self.at - offset + 1
        if match is None and not self.ended:
            end = markers.begun(self.text, self.at + offset)
        return match, end - self.at

    def seek(self, offset: int, markers: Markers, limit: int) -> Wait[tuple[int, str | None]]:
        """Return the offset of the first marker from `offset` on, and the marker, taking nothing.

        The marker is None when `limit` characters, or all there are, hold none.
        """
        begin = offset
        while True:
            match = markers.search(self.text, self.at + offset, begin + limit - offset)
            size = len(self.text) - self.at
            seen = match.start() - self.at if match else min(size, begin + limit)
            self.visited += seen - offset + 1
            if match and match.start() - self.at - begin <= limit:
                return match.start() - self.at, match.group()
            offset = markers.begun(self.text, self.at + offset) - self.at
            if match or self.ended or offset - begin > limit:  # what has begun may be within it
                return min(size, begin + limit), None
            yield

    def starts(self, offset: int, options: Sequence[str]) -> Wait[str | None]:
        """Return which of `options` stands at `offset`, the first if several; None for none."""
        while True:
            place = self.at + offset
            rest = self.text[place : place + max(map(len, options))]
            self.visited += 1
            for option in options:
                if rest.startswith(option):
                    return option
                if option.startswith(rest) and not self.ended:
                    break  # it may still come
            else:
                return None
            yield

    def skip_space(self, offset: int, limit: int) -> Wait[int]:
        """Return the offset of what follows the white space at `offset`, at most `limit` on."""
        begin = offset
        while True:
            match = _NOT_SPACE.search(self.text, self.at + offset)
            end = (match.start() if match else len(self.text)) - self.at
            self.visited += end - offset + 1
            if match or self.ended or end - begin >= limit:
                return min(end, begin + limit)
            offset = end
            yield

    def peek(self, offset: int) -> Wait[str]:
        """Return the character at `offset`, "" past the end."""
        while len(self.text) <= self.at + offset and not self.ended:
            yield
        return self.text[self.at + offset : self.at + offset + 1]

    def drop_space(self) -> Wait[None]:
        """Take white space as long as it comes."""
        while True:
            match = _NOT_SPACE.search(self.text, self.at)
            end = match.start() if match else len(self.text)
            self.visited += end - self.at + 1
            self.at = end
            if match or self.ended:
                return
            yield

    def drop(self, options: Sequence[str]) -> Wait[None]:
        """Take one of `options` if it comes next, also when the end cuts it off."""
        found = yield from self.starts(0, options)
        if found is None and self.ended:
            rest = self.text[self.at :]
            found = rest if rest and any(option.startswith(rest) for option in options) else None
        self.take(len(found or ""))
