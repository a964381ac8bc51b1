"""Outputs that broke other servers: the right value, at every split, whatever the family."""

import pytest
from scanned import Scanned, check_events
from tool_call_cases import CASES

LONG = 400  # characters; longer outputs are cut at fewer places


def splits(text):
    """Return the text in two pieces for each place, in characters, and in a few sizes."""
    places = range(len(text) + 1)
    if len(text) > LONG:
        places = [*places[:100], *places[100:-100:997], *places[-100:]]
    yield from ([text[:at], text[at:]] for at in places)
    yield from ([text[i : i + size] for i in range(0, len(text), size)] for size in (1, 3, 7))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-{case.format.name}")
def test_it_is_read_right_at_every_split(case):
    whole = Scanned(case.format, [case.text], **case.options)
    assert whole.plain == case.said
    check_events(whole)
    for pieces in splits(case.text):
        scanned = Scanned(case.format, pieces, **case.options)
        assert scanned.items == whole.items, pieces
        check_events(scanned)
