"""Log probabilities stand beside the text that their tokens have given, each once."""

import pytest
import text_models
from hypothesis import given
from hypothesis import strategies as st
from pushed import GREP, feed

from agentserve import wire
from agentserve.engine.plan import TokenLogprobs
from agentserve.sessions.toolformat import HERMES, JSON

CALL = f"<tool_call>\n{GREP}\n</tool_call>"


def beside(ids):
    """Log probabilities that tell the place and the id that they belong to."""
    return [TokenLogprobs(-float(place), [one, 0], [-0.5, -1.0]) for place, one in enumerate(ids)]


def told(format, text, **options):
    """Return the items of `text`, whose events are checked, and its ids."""
    stream, events, ids = feed(format, text, logprobs=beside, **options)
    for index, item in enumerate(stream.items):
        deltas = [e for e in events if isinstance(e, wire.TextDelta) and e.index == index]
        if isinstance(item, wire.TextOut):
            assert [one for delta in deltas for one in delta.logprobs] == item.logprobs
            check_covers(item, ids)
    places = [one.logprob for item in stream.items for one in getattr(item, "logprobs", [])]
    assert places == sorted(set(places), reverse=True)
    return stream.items, ids


def check_covers(item, ids):
    """The tokens give the item's text; neither the first nor the last is one too many."""
    assert [one.id for one in item.logprobs] == [ids[int(-one.logprob)] for one in item.logprobs]
    pieces = [bytes(one.bytes) for one in item.logprobs]
    whole, text = b"".join(pieces), item.text.encode()
    start = whole.index(text)
    assert start < len(pieces[0])
    assert start + len(text) > len(whole) - len(pieces[-1])


@pytest.mark.parametrize("step", [1, 3, 100])
def test_text_beside_calls_and_reasoning_has_those_of_its_own_tokens(step):
    text = f"<think>\nWhere is it?\n</think>\n\nI look. \n{CALL}\n Done: größer 🙂.\n"
    items, _ = told(HERMES, text, step=step)
    assert [type(item) for item in items] == [
        wire.ReasoningOut,
        wire.TextOut,
        wire.ToolCallOut,
        wire.TextOut,
    ]


def test_a_stop_string_takes_away_those_of_what_it_cuts():
    items, ids = told(JSON, "One two three four", stop=("ee four",))
    assert items[0].text == "One two thr"
    assert len(items[0].logprobs) < len(ids)


def test_parts_of_a_character_are_bytes_and_escaped_text():
    (item,), ids = told(JSON, "🙂")
    assert len(ids) > 1
    assert b"".join(bytes(one.bytes) for one in item.logprobs).decode() == "🙂"
    assert all(one.token.isascii() and one.token.startswith("\\x") for one in item.logprobs)


def test_the_likeliest_tokens_are_named_and_a_control_token_by_its_name():
    tokenizer = text_models.tokenizer("qwen3")
    stop = tokenizer.stop_ids[0]

    def ending(ids):
        return [TokenLogprobs(-1.0, [stop, one], [-0.5, -1.0]) for one in ids]

    stream, _, _ = feed(HERMES, "Hi", logprobs=ending)
    top = stream.items[0].logprobs[0].top
    assert [one.id for one in top][:1] == [stop]
    assert top[0].token == tokenizer.control_text(stop)
    assert top[0].bytes == list(top[0].token.encode())


@given(
    st.lists(st.sampled_from([CALL, "<think>", "</think>", "a b", " ", "\n\n", "é", "🙂", "{"])),
    st.integers(1, 7),
)
def test_each_token_of_any_output_is_told_at_most_once_and_in_order(parts, step):
    told(HERMES, "".join(parts), step=step)
