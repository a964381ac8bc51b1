"""Mutated and adversarial outputs: a result or data about the error, always, in linear time."""

import collections

import adversarial_outputs
import msgspec
import pytest
import tool_call_fuzz
from scanned import Scanned, check_events

SEED, OUTPUTS, PARTS = "ci", 5_000, 10
SIZE = 20_000  # characters


@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_outputs_are_read_the_same_however_they_are_cut(part):
    seen = collections.Counter()
    for number in range(part, OUTPUTS, PARTS):
        format, kinds = tool_call_fuzz.check(SEED, number)
        seen.update([format, *kinds])
    assert set(seen) == {*tool_call_fuzz.NAMES, *tool_call_fuzz.KINDS}


@pytest.mark.parametrize("format", adversarial_outputs.families(), ids=lambda format: format.name)
def test_the_work_grows_with_the_text_and_no_faster(format):
    format = msgspec.structs.replace(format, one_call=False)
    for label, text in adversarial_outputs.outputs(format, SIZE):
        whole = Scanned(format, [text])
        assert whole.scanner.visited <= tool_call_fuzz.VISITS * len(text) + 2000, label
        cut = [text[at : at + 500] for at in range(0, len(text), 500)]
        pieces = Scanned(format, cut)
        assert pieces.items == whole.items, label
        assert pieces.scanner.visited <= tool_call_fuzz.VISITS * len(text) + 2000, label
        check_events(pieces)
