"""Finding the places of generated messages in rendered text, so that their ids can go there."""

import re

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


def splice(text: str, quote: str, generation_prompt: str) -> list[Piece]:
    """Cut rendered text at the keys.

    Where the template still prints a message's reasoning, the message is what its log has: the
    generation prompt, then all ids. So the template's own text from there to the answer goes.
    """
    pieces: list[Piece] = []
    position = 0
    whole = -1
    for match in re.finditer(f"{quote}(r?)([0-9]+){quote}", text):
        index = int(match[2])
        before = text[position : match.start()]
        position = match.end()
        if match[1]:
            cut = before.rfind(generation_prompt) if generation_prompt else -1
            whole = index if cut >= 0 else -1
            pieces.append(before[: cut + len(generation_prompt)] if cut >= 0 else before)
        elif index == whole:
            pieces.append(Kept(index, whole=True))
        else:
            pieces += (before, Kept(index, whole=False))
    pieces.append(text[position:])
    return joined(pieces)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with neighbouring text joined and empty text left out."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and result and isinstance(result[-1], str):
            result[-1] += piece
        elif piece != "":
            result.append(piece)
    return result
