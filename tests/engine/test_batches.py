"""Many turns at once: budget, order, preemption, sharing, and the plans that runners see."""

import random

from engine_driver import Driver, alone

from agentserve.config import EngineSettings
from agentserve.engine.messages import Cancel, Tokens
from agentserve.kv.prefix import sha256

PROMPT = list(range(20))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(50)]
    return [shared + [rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def test_64_concurrent_sessions_give_what_each_gives_alone():
    d = Driver(num_blocks=700, block_size=16, max_slots=64)
    for number, prompt in enumerate(prompts(64), start=1):
        d.submit(number, prompt, max_tokens=24)
    d.drain()
    for turn, prompt in enumerate(prompts(64), start=1):
        assert d.output[turn] == alone(prompt, 24)


def test_64_sessions_finish_on_a_pool_that_holds_three():
    d = Driver(num_blocks=24, block_size=16, max_slots=16)
    for number, prompt in enumerate(prompts(64), start=1):
        d.submit(number, prompt, max_tokens=16)
    d.drain()
    for turn, prompt in enumerate(prompts(64), start=1):
        assert d.output[turn] == alone(prompt, 16)
    assert d.engine.stats().evictions > 0


def test_no_decode_waits_while_a_long_prompt_is_computed():
    d = Driver(num_blocks=600, max_context=8192, settings=EngineSettings(token_budget=256))
    decoding = [d.submit(n, [n] * 30, max_tokens=60) for n in range(8)]
    while len(d.output) < 8:
        d.step()
    long = d.submit(99, [5, 6] * 3000, max_tokens=1)
    steps = 0
    while long not in d.finished:
        got = {event.turn for event in d.step() if isinstance(event, Tokens)}
        assert got >= set(decoding)
        steps += 1
    assert steps == 25  # 6000 tokens beside 8 decodes in a budget of 256
    d.drain()


def test_a_running_prefill_comes_before_new_admissions():
    d = Driver(settings=EngineSettings(token_budget=16, check_invariants=True))
    first, second = d.submit(1, list(range(100, 140))), d.submit(2, PROMPT)
    d.step()
    d.step()
    assert first in d.started
    assert second not in d.started
    d.drain()
    assert d.output[second] == alone(PROMPT, 4)


def test_no_step_computes_more_than_the_budget():
    d = Driver(settings=EngineSettings(token_budget=16, check_invariants=True))
    for number, prompt in enumerate(prompts(20)):
        d.submit(number, prompt)
    d.drain()
    assert max(sum(row.count for row in plan.rows) for plan in d.runner.plans) == 16


def test_the_youngest_is_preempted_and_gives_the_same_tokens():
    d = Driver(num_blocks=12, block_size=4)
    old = d.submit(1, list(range(20)), max_tokens=26)
    young = d.submit(2, list(range(60, 76)), max_tokens=26)
    d.drain()
    assert d.finished[old].preemptions == 0
    assert d.finished[young].preemptions > 0
    assert d.finished[young].recomputed > 0
    assert d.output[old] == alone(range(20), 26)
    assert d.output[young] == alone(range(60, 76), 26)


def test_a_preempted_turn_is_started_once_and_can_be_cancelled():
    d = Driver(num_blocks=12, block_size=4)
    d.submit(1, list(range(20)), max_tokens=26)
    young = d.submit(2, list(range(60, 76)), max_tokens=26)
    while not d.engine.stats().preemptions:
        d.step()
    d.engine.apply(Cancel(young))
    d.drain()
    assert d.finished[young].reason == "cancelled"
    assert d.finished[young].preemptions == 1


def test_a_turn_that_needs_the_whole_pool_gets_it_in_spite_of_a_twin():
    # The second turn repeats the first: each block it decodes has an equal one in the index.
    d = Driver(num_blocks=6, block_size=4)
    d.run(1, PROMPT[:5], max_tokens=16)
    turn = d.run(2, PROMPT[:5], max_tokens=100)
    assert d.output[turn] == alone(PROMPT[:5], 20)
    assert d.finished[turn].reason == "context"


def test_100_equal_turns_compute_100_equal_units():
    d = Driver(num_blocks=200, block_size=16, max_context=4096)
    log: list[int] = []
    for number in range(100):
        new = [number % 256] * 10
        turn = d.run(1, new, keep=len(log), max_tokens=5, stop_ids=[3], force=[7, 8, 9, 10, 3])
        log += [*new, 7, 8, 9, 10]
        assert d.started[turn].computed == 10
        assert d.finished[turn].kv_length == len(log)
    assert d.engine.stats().prefill_tokens == 100 * 10


def test_less_than_four_percent_of_the_blocks_in_use_is_empty():
    d = Driver(num_blocks=2000, block_size=16, max_context=4096, settings=EngineSettings())
    for number in range(16):
        d.submit(number, [number, *range(200)] * 3, max_tokens=64)
    worst = 0.0
    while d.engine.busy:
        d.step()
        stats = d.engine.stats()
        used = (stats.blocks_total - stats.blocks_free) * 16
        worst = max(worst, 1 - stats.tokens_in_kv / used)
    assert worst < 0.04


def test_an_index_with_8_bit_digests_gives_the_same_tokens():
    d = Driver(num_blocks=80, block_size=2, digest=lambda data: sha256(data)[:1])
    for number, prompt in enumerate(prompts(40, seed=1), start=1):
        d.submit(number, prompt[45:], max_tokens=12)
    d.drain()
    for turn, prompt in enumerate(prompts(40, seed=1), start=1):
        assert d.output[turn] == alone(prompt[45:], 12)


def test_equal_prompts_at_once_give_equal_tokens_and_share_later():
    d = Driver(num_blocks=64, block_size=4)
    turns = [d.submit(n, PROMPT, max_tokens=9) for n in range(1, 5)]
    d.drain()
    assert all(d.output[turn] == alone(PROMPT, 9) for turn in turns)
    log = PROMPT + d.output[1]
    for number in range(1, 5):
        turn = d.run(number, [9], keep=len(log))
        assert d.started[turn].cached == len(log) - 1
        assert d.output[turn] == alone([*log, 9], 4)


def test_a_plan_names_only_the_blocks_that_were_appended():
    d = Driver(block_size=4)
    d.run(1, PROMPT, max_tokens=13)
    first, *later = d.runner.plans
    assert [len(a.blocks) for a in first.appended] == [5]
    assert [len(a.blocks) for plan in later for a in plan.appended] == [1, 1, 1]
    assert all(not plan.added for plan in later)


def test_a_slot_gets_a_new_generation_with_each_owner():
    d = Driver(max_slots=1)
    d.run(1, PROMPT)
    d.run(2, PROMPT)
    adds = [add for plan in d.runner.plans for add in plan.added]
    drops = [drop for plan in d.runner.plans for drop in plan.dropped]
    assert [(a.slot, a.generation) for a in adds] == [(0, 1), (0, 2)]
    assert [(x.slot, x.generation) for x in drops] == [(0, 1)]
