import json
import random

from hypothesis import given
from hypothesis import strategies as st

from agentserve.dialects.asked import Answered, AskedCall, Result, Said, segments
from agentserve.dialects.digests import chain
from agentserve.dialects.index import MAX_POSITIONS, MAX_TWINS, Index, Known, Position

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


def answer(text, arguments, form):
    return Answered(text, "", (AskedCall("c", "f", form(arguments)),))


def conversation(answered):
    return [Said("user", "a"), answered, Result("c", "r"), Said("user", "b")]


def end(units):
    return chain(segments(units)).end


@given(st.text(max_size=20), ARGUMENTS, st.integers())
def test_the_form_of_arguments_ids_and_reasoning_do_not_count(text, arguments, seed):
    def shuffled(value):
        keys = list(value)
        random.Random(seed).shuffle(keys)
        return json.dumps({key: value[key] for key in keys}, indent=1, ensure_ascii=seed % 2 == 0)

    one = conversation(answer(text, arguments, json.dumps))
    other = conversation(answer(f" {text}\n", arguments, shuffled))
    other[1] = Answered(f" {text}\n", "thought", (AskedCall("d", "f", shuffled(arguments)),))
    other[2] = Result("d", "r")
    assert end(one) == end(other)


def test_integral_floats_are_integers():
    one, other = (conversation(answer("", {"n": n}, json.dumps)) for n in (1, 1.0))
    assert end(one) == end(other)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(0, 3))
def test_everything_else_counts(texts, at):
    units = [unit for text in texts for unit in (Said("user", text), Answered(text))]
    changed = list(units)
    at = at % len(changed)
    changed[at] = (
        Said("user", changed[at].text + "!")
        if isinstance(changed[at], Said)
        else Answered(changed[at].text + "!")
    )
    assert end(units) != end(changed)
    assert end(units) != end([*units, Said("user", "")])
    assert end([Said("system", "a")]) != end([Said("user", "a")])


def test_the_index_is_bounded_and_forgets_whole_sessions():
    index = Index("me")
    for number in range(MAX_TWINS + 3):
        index.add(Known(f"s{number}", b"", number, True, 0.0))
        index.place(b"same", Position(f"s{number}", "t_1"))
        index.join(("header", "x"), f"s{number}")
    assert len(index.find(b"same")) == MAX_TWINS
    for number in range(MAX_POSITIONS + 50):
        index.place(str(number).encode(), Position("s9", f"t_{number}"))
    assert index.find(b"0") == []
    for number in range(MAX_TWINS + 3):
        index.forget(f"s{number}")
    assert index.sessions == {}
    assert index._positions == {}
    assert index._families == {}
    assert index._tags == {}


def test_results_find_their_calls_among_many_and_among_calls_of_one_id():
    count = 50_000  # looking through all calls for each result would take minutes
    calls = tuple(AskedCall(f"c{number // 2}", "f", "{}") for number in range(count))
    results = [Result(call.call_id, str(number)) for number, call in enumerate(calls)]
    fed = segments([Answered(calls=calls), *results])[1].results
    assert [(place, result.text) for place, result in fed] == [
        (number, str(number)) for number in range(count)
    ]
