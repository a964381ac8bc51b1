"""Breaking control strings inside client text before a template renders it.

A mark is a noncharacter that occurs nowhere in the input. It is put inside everything that could
become a control string once the template has placed its own text around it, survives rendering,
and is removed before encoding (`Tokenizer.encode_render`).
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from agentserve.errors import InvalidRequest

# Unicode's noncharacters: never assigned, so that honest text does not hold them.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)] + [
    chr((plane << 16) + low) for plane in range(17) for low in (0xFFFE, 0xFFFF)
]
# Templates compare these with their own strings, so a mark in them would be seen.
_SCHEMA_WORDS = frozenset(
    {
        "object",
        "string",
        "integer",
        "number",
        "boolean",
        "array",
        "null",
        "type",
        "properties",
        "required",
        "description",
        "items",
        "enum",
        "default",
        "title",
        "format",
        "name",
        "parameters",
        "arguments",
        "additionalProperties",
        "anyOf",
    }
)


class Breaker:
    """Breaks the control strings of one vocabulary."""

    def __init__(self, controls: Iterable[str]) -> None:
        self._controls = tuple(controls)
        seconds: dict[str, set[str]] = {}
        for text in self._controls:
            seconds.setdefault(text[0], set()).add(text[1])
        pairs = [
            f"{re.escape(first)}(?=[{re.escape(''.join(sorted(after)))}])"
            for first, after in sorted(seconds.items())
        ]
        self._pairs = re.compile("|".join(pairs) if pairs else r"(?!)")
        self._heads = tuple({t[:i] for t in self._controls for i in range(1, len(t))})
        self._tails = tuple({t[i:] for t in self._controls for i in range(1, len(t))})
        self._longest = max(map(len, self._controls), default=0)
        bare = {text.strip("<>[]/|") for text in self._controls}
        self._plain = _SCHEMA_WORDS - bare  # "<" + "title" + ">" may be one

    def text(self, text: str, mark: str) -> str:
        """Return `text` with `mark` in it so that no control string can arise from it.

        Marked are: the first two characters of a control string wherever they stand together,
        the edges when the template's neighbouring text could complete a control string there,
        and short text that could be the middle of one.
        """
        if not text or text in self._plain:
            return text
        broken = self._pairs.sub(lambda match: match.group() + mark, text)
        inside = len(text) < self._longest and any(text in control for control in self._controls)
        if inside or text.startswith(self._tails):
            broken = mark + broken
        if text.endswith(self._heads):
            broken += mark
        return broken

    def value(self, value: Any, mark: str) -> Any:
        """Return a JSON value with every string and key broken."""
        if isinstance(value, str):
            return self.text(value, mark)
        if isinstance(value, dict):
            return {self.text(key, mark): self.value(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, mark) for item in value]
        return value


def strings(value: Any) -> Iterator[str]:
    """Yield every string and key of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def choose_marks(texts: list[str], count: int) -> list[str]:
    """Return `count` noncharacters that occur in none of `texts`, also not as a JSON escape.

    Raises InvalidRequest when the texts use nearly all of them.
    """
    free: list[str] = []
    for mark in _NONCHARACTERS:
        escape = f"\\u{ord(mark):04x}"
        if not any(mark in text or escape in text for text in texts):
            free.append(mark)
            if len(free) == count:
                return free
    raise InvalidRequest("the text holds too many different Unicode noncharacters")
