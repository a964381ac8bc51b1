import random
import re
from pathlib import Path

import pytest

from agentserve.sessions.brackets import Brackets

ROOT = Path(__file__).parents[2]


def scanned(pieces: list[str]) -> tuple[int, str]:
    """Where a scan of the pieces, one after the other, stopped, and why."""
    brackets, before = Brackets(0), 0
    for piece in pieces:
        at, state = brackets.advance(piece, 0, 0)
        if state != "open":
            return before + at, state
        before += at
    return before, "open"


def test_a_value_ends_at_the_same_place_wherever_the_text_is_cut():
    text = r'{"path": "a.py", "new": "r.ljust(2, \"0\")", "n": [1.5, {"\\": ""}], "é": null}'
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:] + "} more"]
            assert scanned(pieces) == (len(text), "closed"), pieces


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_scanned_as_single_characters_are(seed):
    source = random.Random(seed)
    for _ in range(500):
        text = "{" + "".join(source.choices('{}[]"\\ n1,:\x01<é\n"', k=source.randrange(14)))
        cut = source.randrange(len(text) + 1)
        assert scanned([text[:cut], text[cut:]]) == scanned(list(text)), (text, cut)


def test_no_group_is_possessive_because_python_before_3_11_5_matches_it_wrongly():
    group = re.compile(r"\)(?:[*+?]|\{\d*,?\d*\})\+|\(\?>")
    for top in ("agentserve", "kernels", "tools"):
        for path in (ROOT / top).rglob("*.py"):
            lines = path.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if group.search(line)], path
