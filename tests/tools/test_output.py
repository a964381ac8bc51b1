"""Output is bounded and keeps its beginning and its end."""

import re
from dataclasses import dataclass
from pathlib import Path

from agentserve_tools.output import Aside, HeadTail, clip
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(st.lists(st.text("abc\n", max_size=9), max_size=12), st.integers(2, 12))
def test_head_and_tail_are_what_one_cut_of_the_whole_would_give(pieces, limit):
    kept = HeadTail(limit)
    for piece in pieces:
        kept.push(piece)
    whole = "".join(pieces)
    assert kept.dropped == max(0, len(whole) - limit)
    if kept.dropped:
        assert kept.text().startswith(whole[: limit - limit // 2] + "\n[... ")
        assert kept.text().endswith(" ...]\n" + whole[len(whole) - limit // 2 :])
    else:
        assert kept.text() == whole


@settings(deadline=None)
@given(st.lists(st.text("abc\n\r\x85é\ud800", max_size=9), max_size=12), st.integers(2, 12))
def test_what_is_cut_is_whole_in_its_file(pieces, limit):
    aside = Aside()
    kept = HeadTail(limit, aside)
    for piece in pieces:
        kept.push(piece)
    whole = "".join(pieces)
    names = re.findall(r"; the whole is in (\S+) \.\.\.\]", kept.text())
    assert bool(names) == bool(kept.dropped)
    for name in names:
        assert Path(name).read_bytes() == whole.encode(errors="replace")


def test_a_full_disk_leaves_no_file_with_a_hole(monkeypatch):
    kept = HeadTail(4, Aside())
    kept.push("0123456789")
    (name,) = re.findall(r"is in (\S+) ", kept.text())

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    kept.push("more")
    assert kept.text() == "01\n[... 10 characters left out ...]\nre"
    assert not Path(name).exists()


def test_structures_stay_structures_when_they_fit():
    @dataclass
    class Row:
        n: int

    assert clip([Row(1), {"k": [1, 2]}], 100) == ([{"n": 1}, {"k": [1, 2]}], False)


def test_a_structure_that_is_too_large_becomes_marked_text():
    text, cut = clip(list(range(1000)), 20)
    assert cut
    assert text.startswith("[0,1,2,3,4\n[... ")
    assert text.endswith("998,999]")


def test_what_has_no_json_form_becomes_its_text():
    class Odd:
        def __str__(self):
            return "odd"

    loop: list = []
    loop.append(loop)
    assert clip(Odd(), 10) == ("odd", False)
    assert clip(loop, 10) == ("[[...]]", False)
