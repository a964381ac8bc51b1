"""Outputs that broke other servers: the right value, at every split, whatever the family."""

import pytest
from scanned import Scanned, check_events
from tool_call_cases import CASES

from agentserve.sessions.forms.values import value_types

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


def test_the_types_of_a_value_are_found_in_linear_time():
    most = 300
    places = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * most} for level in range(6)
    }
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/d0"}, "q": {"$ref": "#/$defs/loop"}},
        "$defs": {
            **places,
            "d6": {"type": ["integer", "null"]},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * most},
        },
    }
    assert value_types(schema, "p") == {"integer", "null"}
    assert value_types(schema, "q") == set()
