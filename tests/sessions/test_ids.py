import random
import re

from hypothesis import given
from hypothesis import strategies as st

from agentserve.sessions.ids import CallIds, CallOrigin, new_session_id, prompt_call_id
from agentserve.wire import SESSION_ID, TOOL_NAME


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_a_call_id_names_its_session_turn_and_number(tag, turn, number):
    ids = CallIds(b"key")
    call = ids.mint(tag, turn, number)
    assert re.fullmatch(r"call_[A-Za-z0-9_-]{1,35}", call)
    assert ids.read(call) == CallOrigin(tag, turn, number)


@given(st.integers(5, 39), st.sampled_from("ABCDwxyz0189-_"))
def test_a_changed_call_id_is_not_ours(place, character):
    ids = CallIds(b"key")
    call = ids.mint(7, 3, 1)
    changed = call[:place] + character + call[place + 1 :]
    assert ids.read(changed) == (CallOrigin(7, 3, 1) if changed == call else None)


def test_another_server_s_call_ids_and_foreign_ids_are_not_ours():
    call = CallIds(b"one").mint(1, 2, 3)
    for foreign in (call, "call_abc", "toolu_01", "", "call_" + "é" * 35):
        assert CallIds(b"two").read(foreign) is None


def test_session_ids_have_144_random_bits_and_fit_the_pattern():
    source = random.Random(1)
    ids = {new_session_id(source) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.match(SESSION_ID, one) and len(one) == 26 for one in ids)


def test_names_do_not_end_in_a_newline():
    for pattern in (SESSION_ID, TOOL_NAME):
        assert re.search(pattern, "a")
        assert not re.search(pattern, "a\n")


def test_template_call_ids_are_nine_characters_and_differ():
    ids = {prompt_call_id(turn, number) for turn in range(1, 300) for number in range(20)}
    assert len(ids) == 299 * 20
    assert {len(one) for one in ids} == {9}
