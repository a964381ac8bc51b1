"""Finding the places of generated messages in rendered text, so that their ids can go there."""

import re
from functools import cache

import msgspec


class Kept(msgspec.Struct, frozen=True):
    """The ids of message `index` go here: all of them, or what follows the reasoning."""

    index: int
    whole: bool


Piece = str | Kept


def text_key(index: int, quote: str) -> str:
    """Return what stands in the render for the text of message `index`."""
    return f"{quote}{index}{quote}"


def reasoning_key(index: int, quote: str) -> str:
    """Return what stands in the render for the reasoning of message `index`."""
    return f"{quote}r{index}{quote}"


class Seams(msgspec.Struct, frozen=True):
    """What tells a message's own text from the template's around it.

    `prompt` is the generation prompt, `headed` says that models write a header after it. Where the
    key of a message in `called` is an argument, the message begins after the prompt or else with
    the first of `openers`, and ends before the next of `stops`.
    """

    prompt: str = ""
    headed: bool = False
    called: frozenset[int] = frozenset()
    openers: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()


def splice(text: str, quote: str, seams: Seams) -> list[Piece]:
    """Cut rendered text at the keys.

    Where the template still prints a message's reasoning, the message is what its log has: the
    generation prompt, then all ids. So the template's own text from there to the answer goes.
    Raises ValueError when the end of a message with calls cannot be told.
    """
    pieces: list[Piece] = []
    position = 0
    whole = -1
    for match in _keys(quote).finditer(text):
        index = int(match[2])
        before = text[position : match.start()]
        position = match.end()
        if match[1]:
            cut = _after(before, seams.prompt)
            whole = index if cut is not None else -1
            pieces.append(before[:cut])
            continue
        called = index in seams.called
        if called:
            position = _ending(text, position, seams.stops)
        if index == whole:
            pieces.append(Kept(index, whole=True))
        else:
            cut = _after(before, seams.prompt) if called or seams.headed else None
            if called and cut is None:
                cut = _opening(before, seams.openers)
            pieces += (before[:cut], Kept(index, whole=False))
    pieces.append(text[position:])
    return joined(pieces)


@cache
def _keys(quote: str) -> re.Pattern[str]:
    return re.compile(f"{quote}(r?)([0-9]+){quote}")


def _after(text: str, prompt: str) -> int | None:
    """Return where the last generation prompt in `text` ends."""
    at = text.rfind(prompt) if prompt else -1
    return at + len(prompt) if at >= 0 else None


def _opening(text: str, openers: tuple[str, ...]) -> int:
    """Return where the last call in `text` opens."""
    for opener in openers:
        at = text.rfind(opener)
        if at >= 0:
            return at
    raise ValueError("where a generated message begins cannot be told")


def _ending(text: str, position: int, stops: tuple[str, ...]) -> int:
    found = [at for stop in stops if (at := text.find(stop, position)) >= 0]
    if not found:
        raise ValueError("where a generated message ends cannot be told")
    return min(found)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with neighbouring text joined and empty text left out."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and result and isinstance(result[-1], str):
            result[-1] += piece
        elif piece != "":
            result.append(piece)
    return result
