"""What is found in text that comes in pieces is what is found in the whole."""

import pytest
from scanned import Scanned

from agentserve.sessions.forms.reading import OPENING
from agentserve.sessions.forms.window import Markers, Window
from agentserve.sessions.toolformat import FORMATS

STOPS = Markers(("<end>", "!"))
LIMIT = 5


def sought(pieces):
    """Return what a seek finds; after the last piece the text ends."""
    window, found = Window(), []

    def seek():
        found.append((yield from window.seek(1, STOPS, LIMIT)))

    run = seek()
    for piece in pieces:
        window.push(piece)
        next(run, None)
    window.end("")
    next(run, None)
    return found


@pytest.mark.parametrize("stop", ["<end>", "!", "<en", "<", ""])
def test_a_marker_around_the_limit_is_found_or_not_however_the_text_is_cut(stop):
    for before in range(LIMIT + 5):
        text = "m" + "x" * before + stop + "yyyyyyy"
        whole = sought([text])
        assert len(whole) == 1
        for cut in range(1, len(text)):
            assert sought([text[:cut], text[cut:]]) == whole
        assert sought(text) == whole


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_signs_around_the_longest_opening_read_the_same_in_pieces(format):
    signs = [*format.form.markers, *format.form.noise]
    closing = format.form.write([("ls", {})])
    for sign in signs:
        for more in range(OPENING - 12, OPENING + 4):
            text = f"{sign * 3}{'x' * (more - len(sign))}{sign}{closing}"
            whole = Scanned(format, [text]).plain
            assert Scanned(format, text).plain == whole
            assert Scanned(format, [text[:OPENING], text[OPENING:]]).plain == whole
