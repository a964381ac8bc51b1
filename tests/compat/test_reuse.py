"""The rule that `make compat` holds every client to notices each way of breaking it."""

import pytest
from reuse import steps


def turn(number, prompt, output, cached, previous=None, recomputed=(), session="s"):
    usage = {"input_tokens": prompt, "output_tokens": output, "cached_tokens": cached}
    usage["recomputed"] = [{"tokens": tokens, "reason": reason} for tokens, reason in recomputed]
    return {"session": session, "id": f"t_{number}", "previous": previous, "usage": usage}


FIRST = turn(1, 100, 20, 0)


@pytest.mark.parametrize(("cached", "missing"), [(119, 0), (150, 0), (118, 1), (100, 19), (0, 119)])
def test_all_but_the_last_token_of_the_answer_has_to_be_cached(cached, missing):
    second = steps([FIRST, turn(2, 200, 5, cached, "t_1")])[1]
    assert (second.missing, second.rewritten) == (missing, 0)


def test_what_was_recomputed_for_a_reason_is_excused_and_no_more():
    why = [(30, "evicted"), (10, "evicted"), (5, "template")]
    second = steps([FIRST, turn(2, 200, 5, 70, "t_1", why)])[1]
    assert second.recomputed == {"evicted": 40, "template": 5}
    assert second.missing == 4


def test_an_answer_that_is_not_the_one_before_counts_as_rewritten():
    second = steps([FIRST, turn(3, 200, 5, 99, "t_2")])[1]
    assert (second.rewritten, second.missing) == (19, 1)


@pytest.mark.parametrize(("cached", "missing"), [(96, 0), (95, 1)])
def test_a_rewritten_answer_in_another_session_shares_whole_blocks(cached, missing):
    second = steps([FIRST, turn(9, 200, 5, cached, session="other")])[1]
    assert (second.rewritten, second.partial_block, second.missing) == (19, 4, missing)


def test_a_fork_that_follows_the_turn_before_shares_all_of_it():
    second = steps([FIRST, turn(9, 200, 5, 112, "t_1", session="other")])[1]
    assert (second.rewritten, second.missing) == (0, 7)
