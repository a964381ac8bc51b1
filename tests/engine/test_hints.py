"""What hints do: where the KV of a waiting sequence is kept, and what is learnt of waits."""

import pytest
from engine_driver import alone
from two_tiers import PROMPT, with_host

from agentserve.config import EngineSettings
from agentserve.engine.messages import Close


def test_a_hint_to_the_host_empties_the_device_and_costs_no_prefill():
    d = with_host()
    log = PROMPT + d.output[d.run(1, PROMPT)]
    d.offload(1)
    assert d.where(1) == (0, 23)
    turn = d.run(1, [7], keep=24)
    assert (d.started[turn].cached, d.started[turn].host, d.started[turn].computed) == (23, 23, 2)
    assert d.output[turn] == alone([*log, 7], 4)


def test_a_hint_to_drop_forgets_the_kv_in_both_tiers():
    d = with_host()
    log = PROMPT + d.output[d.run(1, PROMPT)]
    assert d.where(1) == (23, 23)
    d.hint(1, "drop")
    assert d.where(1) == (0, 0)
    assert not d.engine.stats().blocks_cached + d.engine.stats().host_cached
    turn = d.run(1, [7], keep=24)
    assert (d.started[turn].cached, d.started[turn].computed, d.started[turn].lost) == (0, 25, 23)
    assert d.output[turn] == alone([*log, 7], 4)


def test_a_hint_to_keep_it_on_the_device_makes_a_more_recent_one_leave_first():
    for hint, kept in (("auto", 2), ("device", 1)):
        d = with_host()
        for sequence in (1, 2):
            d.run(sequence, [sequence, *PROMPT[1:]])
        d.hint(1, hint)
        d.step(0.1)
        d.run(3, [3, *PROMPT[1:]])
        assert d.where(kept)[0] == 23
        assert d.where(3 - kept)[0] == 0


def test_a_hint_to_keep_it_counts_at_once_however_fresh_the_order_of_victims_is():
    d = with_host()
    for sequence in (1, 2, 3):
        d.submit(sequence, [sequence, *PROMPT[1:]])
        d.step_until(lambda: not d.engine.busy, seconds=0.0)
    d.hint(2, "device")
    d.submit(4, [4, *PROMPT[1:]])
    d.step_until(lambda: not d.engine.busy, seconds=0.0)
    assert (d.where(2)[0], d.where(3)[0]) == (23, 0)


def test_an_expectation_is_believed_as_soon_as_others_have_proved_right():
    d = with_host()
    tool_waits(d, 1, 40, {"any": 5.0}, told=True)
    for sequence, expected in ((2, 1.0), (3, 600.0)):
        d.run(sequence, [sequence, *PROMPT[1:]])
        d.hint(sequence, tools=["any"], expected_s=expected)
    d.step(0.1)
    d.run(4, [4, *PROMPT[1:]])
    assert (d.where(2)[0], d.where(3)[0]) == (23, 0)


def test_what_waits_for_a_tool_that_takes_long_leaves_first_once_that_was_learnt():
    for policy, kept in (("lru+host", 3), ("tool-aware", 2)):
        d = with_host(settings=EngineSettings(kv_policy=policy, check_invariants=True))
        tool_waits(d, 1, 60, {"fast": 1.0, "slow": 300.0})
        for sequence, tool in ((2, "fast"), (3, "slow")):
            d.run(sequence, [sequence, *PROMPT[1:]])
            d.hint(sequence, tools=[tool])
        d.step(0.8)  # the fast one is about to return
        d.run(4, [4, *PROMPT[1:]])
        assert d.where(kept)[0] == 23
        assert d.where(5 - kept)[0] == 0


def tool_waits(d, sequence, count, seconds, *, told=False):
    """Let `sequence` wait `count` times, for the tools in turn, each for its seconds."""
    tools = list(seconds)
    d.run(sequence, PROMPT[:5], max_tokens=1)
    for number in range(count):
        tool = tools[number % len(tools)]
        d.hint(sequence, tools=[tool], expected_s=seconds[tool] if told else None)
        d.step(seconds[tool])
        d.run(sequence, [], keep=5, max_tokens=1)
    d.engine.apply(Close(sequence))
    d.drain()


def test_hints_and_promotions_of_unknown_sequences_are_ignored():
    d = with_host()
    d.hint(99, "drop", ["grep"], 2.5)
    d.promote(99)
    d.promote(99, begin=False)
    assert d.inspect(99) == []
    d.drain()
    turn = d.run(99, PROMPT)
    assert d.output[turn] == alone(PROMPT, 4)


@pytest.mark.parametrize("kv", ["host", "drop", "device"])
def test_a_hint_about_a_running_turn_moves_nothing_of_it(kv):
    d = with_host()
    turn = d.submit(1, PROMPT, max_tokens=10)
    for _ in range(3):
        d.step()
    d.hint(1, kv)
    d.drain()
    assert d.output[turn] == alone(PROMPT, 10)
    assert d.finished[turn].kv_length == 29
