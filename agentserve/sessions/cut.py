"""Where output ends: stop strings, and which token ids end before a place in the text."""

from bisect import bisect_right
from collections.abc import Sequence

from agentserve.sessions.tokenizer import Detokenizer

_WHITE = " \t\r\n"


class StopFinder:
    """Finds the first stop string in a stream; the one that is complete first wins."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._position = 0  # of the held text in the stream

    def push(self, text: str) -> tuple[str, int | None]:
        """Return the text that is surely before any stop string, and where one begins, if any."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at = min(found)
            return text[:at], self._position + at
        size = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[size:]
        self._position += size
        return text[:size], None

    def flush(self) -> str:
        """Return what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class Ledger:
    """Which ids gave which characters."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._parts: list[str] = []
        self._length = 0
        # Characters that exist with each id; one more when it ended inside a character.
        self._ends: list[int] = []
        self._inside: list[bool] = []

    @property
    def count(self) -> int:
        """How many ids there are."""
        return len(self._ends)

    def push(self, token: int) -> str:
        """Take an id and return the text that it completes."""
        text = self._detokenizer.push([token])
        self._add(text)
        inside = self._detokenizer.pending
        self._ends.append(self._length + inside)
        self._inside.append(inside)
        return text

    def flush(self) -> str:
        """Return the text of a character that was never completed."""
        text = self._detokenizer.flush()
        self._add(text)
        return text

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def ids_before(self, position: int) -> int:
        """Return how many ids end at or before `position`."""
        return bisect_right(self._ends, position)

    def ids_within(self, begin: int, end: int) -> list[int]:
        """Return the places of the ids that gave any part of the characters begin to end - 1."""
        places: list[int] = []
        for place in range(bisect_right(self._ends, begin), self.count):
            start = self._begin(place)
            if start >= end:
                break
            if start < self._ends[place]:
                places.append(place)
        return places

    def _begin(self, place: int) -> int:
        """Return where the characters of an id begin, also when it began inside of one."""
        return self._ends[place - 1] - self._inside[place - 1] if place else 0

    def next_word(self, position: int) -> int:
        """Return the place of the first character from `position` on that is not white space."""
        rest = "".join(self._parts)[position:]
        return position + len(rest) - len(rest.lstrip(_WHITE))

    def cut(self, position: int | None, *, spaces: bool) -> tuple[int, str]:
        """Return how many ids end before `position`, and the text between them and it.

        With `spaces` an id that goes on with white space only is not split.
        """
        if position is None:
            return self.count, ""
        kept = self.ids_before(position)
        while kept and self._inside[kept - 1]:
            kept -= 1
        begin = self._ends[kept - 1] if kept else 0
        text = "".join(self._parts)
        if spaces and kept < self.count and begin < position:
            end = self._ends[kept]
            if not self._inside[kept] and position < end and not text[position:end].strip(_WHITE):
                return kept + 1, ""
        return kept, text[begin:position]
