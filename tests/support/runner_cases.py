"""What every runner on a real model must do, whatever device it is on.

`runner` is one of `model`'s runners on a tiny model of VOCAB tokens with 16 tokens a block and
8 slots; the sizes are small where each kernel of it takes milliseconds. Without pytest, because a
bare GPU machine has none.
"""

import random
from array import array

import msgspec
import numpy as np
from runner_driver import Driver, Sequence

from agentserve.engine.plan import SAMPLED, Copy, Row, SamplingParams, SlotDrop, StepPlan, pack

VOCAB = 199
FEATURES = {
    "temperature": SamplingParams(temperature=1.3, seed=3),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=2**63 + 3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.5, seed=3),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3, seed=3),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "presence": SamplingParams(presence_penalty=2.0),
    "frequency": SamplingParams(frequency_penalty=2.0),
    "bias": SamplingParams(logit_bias={7: 50.0}),
    "grammar": SamplingParams(),
}


def prompt(seed, length):
    return random.Random(seed).choices(range(VOCAB), k=length)


def mask_of(tokens):
    words = array("I", [0] * (VOCAB // 32 + 1))
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return words.tobytes()


def pending(sequence):
    return len(sequence.tokens) - sequence.computed


def batched_sequences_give_the_tokens_that_each_gives_alone(runner, count=5, length=12):
    driver = Driver(runner)
    prompts = [prompt(seed, 5 + 13 * seed) for seed in range(count)]
    alone = [driver.generate(Sequence(tokens), length) for tokens in prompts]
    together = [Sequence(tokens) for tokens in prompts]
    for slot, sequence in enumerate(together):
        driver.join(sequence, slot + 2)
    chunks = random.Random(2)
    while any(len(sequence.output) < length for sequence in together):
        work = []
        for sequence in together:
            if len(sequence.output) < length:
                work.append((sequence, min(pending(sequence), chunks.randint(1, 9))))
        driver.step(work)
    assert [sequence.output for sequence in together] == alone
    assert len({token for tokens in alone for token in tokens}) > 2 * count - 3, (
        "constant output would prove nothing"
    )


def a_plain_neighbour_is_not_touched(
    runner, feature, leavings=range(1, 7), slots=((0, 1), (1, 0), (5, 2)), length=6
):
    """A request with a feature comes and goes at every step, slots permuted: B is as alone."""
    driver = Driver(runner)
    plain = prompt(1, 20)
    alone = driver.generate(Sequence(plain), length)
    masks = {0: mask_of([3, 5])} if feature == "grammar" else {}
    for leaving in leavings:
        for first, second in slots:
            neighbour = Sequence(prompt(2, 9), FEATURES[feature])
            subject = Sequence(plain)
            driver.join(neighbour, first)
            driver.join(subject, second)
            for step in range(length):
                if step == leaving:
                    driver.leave(neighbour)
                    driver.release(neighbour)
                work = [(subject, pending(subject))]
                if step < leaving:
                    work.insert(0, (neighbour, pending(neighbour)))
                driver.step(work, masks if step < leaving else {})
            assert subject.output == alone
            if feature == "grammar":
                assert set(neighbour.output) <= {3, 5}
            if step < leaving:
                driver.leave(neighbour)
                driver.release(neighbour)
            driver.leave(subject)
            driver.release(subject)


def a_feature_gives_the_same_tokens_after_a_preemption(runner, feature, length=10):
    driver = Driver(runner)
    expected = driver.generate(Sequence(prompt(4, 18), FEATURES[feature]), length)
    again = Sequence(prompt(4, 18), FEATURES[feature])
    driver.join(again, 3)
    while len(again.output) < length:
        driver.step([(again, pending(again))])
        if len(again.output) == length // 2:
            driver.leave(again)
            driver.release(again)
            again.computed = 0
            driver.join(again, 1)
    assert again.output == expected


def a_mask_binds_its_row_only(runner):
    driver = Driver(runner)
    masked, free = Sequence(prompt(5, 7)), Sequence(prompt(6, 8))
    driver.join(masked, 0)
    driver.join(free, 1)
    result = driver.step([(free, 8), (masked, 7)], {1: mask_of([42])})
    assert result.tokens[1] == [42]
    driver.leave(free)
    assert driver.generate(Sequence(prompt(6, 8)), 1, slot=1) == result.tokens[0]


def a_mask_that_allows_nothing_leaves_its_row_without_a_token(runner):
    driver = Driver(runner)
    barred, free = Sequence(prompt(5, 7)), Sequence(prompt(6, 8))
    driver.join(barred, 0)
    driver.join(free, 1)
    result = driver.step([(barred, 7), (free, 8)], {0: mask_of([])})
    assert result.tokens[0] == []
    assert result.finite == [False, True]
    assert len(result.tokens[1]) == 1


def rows_that_do_not_reach_the_end_give_no_token(runner):
    driver = Driver(runner)
    sequence = Sequence(prompt(7, 30))
    driver.join(sequence, 0)
    assert driver.step([(sequence, 10)]).tokens == [[]]
    assert driver.step([(sequence, 19)]).tokens == [[]]
    assert len(driver.step([(sequence, 1)]).tokens[0]) == 1


def a_row_with_a_non_finite_logit_fails_alone(runner, cache):
    driver = Driver(runner)
    good, bad = Sequence(prompt(8, 10)), Sequence(prompt(9, 10))
    driver.join(good, 0)
    driver.join(bad, 1)
    driver.step([(good, 10), (bad, 10)])
    cache[bad.blocks[0], 0, 0, 0, 3] = float("nan")
    result = driver.step([(bad, 1), (good, 1)])
    assert result.finite == [False, True]
    assert result.tokens[0] == []
    driver.leave(good)
    assert driver.generate(Sequence(prompt(8, 10)), 2, slot=4) == good.output


def a_copied_block_is_as_good_as_the_original(runner, cache, length=5):
    driver = Driver(runner)
    first = Sequence(prompt(3, 24))
    expected = driver.generate(Sequence(prompt(3, 24)), length)
    driver.join(first, 0)
    driver.step([(first, 20)])
    target = driver.free_blocks.pop()
    copy = Copy(ticket=9, group=0, source=first.blocks[1], target=target, tokens=4)
    handle = runner.launch(StepPlan(99, [], [], [], [copy], [], b""))
    runner.sample(handle, {})
    assert runner.collect(handle).tickets == [9]
    fork = Sequence(prompt(3, 24))
    fork.blocks, fork.computed = [first.blocks[0], target], 20
    driver.join(fork, 1)
    cache[first.blocks[1]] = 7.0
    while len(fork.output) < length:
        driver.step([(fork, pending(fork))])
    assert fork.output == expected


def log_probabilities_are_the_model_s_own(runner, logits_of, features=(*FEATURES,), within=1e-3):
    """Before penalties, biases, masks and temperature; a forced token has its own.

    logits_of: token ids -> float32 [vocab] after the last of them, of another implementation.
    """
    driver = Driver(runner)
    plain = Sequence(prompt(12, 9))
    driver.join(plain, 7)
    for count, feature in enumerate(features):
        asking = msgspec.structs.replace(FEATURES[feature], logprobs=count)
        sequence = Sequence(prompt(20 + count, 11), asking, forced=(5, 6) if count % 2 else ())
        driver.join(sequence, 2)
        for _ in range(3):
            masks = {1: mask_of([3, 8])} if feature == "grammar" else {}
            right = log_softmax(logits_of(sequence.tokens))
            work = [(plain, pending(plain)), (sequence, pending(sequence))]
            nothing, (told,) = driver.step(work, masks).logprobs
            assert nothing == []
            assert abs(told.logprob - right[sequence.tokens[-1]]) < within, feature
            assert len(told.top) == len(set(told.top)) == len(told.top_logprobs) == count
            np.testing.assert_allclose(told.top_logprobs, right[told.top], atol=within)
            best = np.sort(right)[::-1][:count]
            np.testing.assert_allclose(told.top_logprobs, best, atol=within)
        driver.leave(sequence)
        driver.release(sequence)
    assert not any(driver.step([(plain, 1)]).logprobs)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def a_drop_of_another_generation_is_refused(runner):
    driver = Driver(runner)
    driver.join(Sequence(prompt(1, 3)), 0)
    driver.step([])
    message = ""
    try:
        runner.launch(StepPlan(5, [SlotDrop(0, 77)], [], [], [], [], b""))
    except ValueError as error:
        message = str(error)
    assert "generation" in message


def tokens_that_only_the_device_knows_are_what_it_sampled(runner, features, length=4):
    """At depth 1: steps are launched before their tokens are known; penalties count them."""
    for params in (FEATURES[feature] for feature in features):
        driver = Driver(runner)
        expected = driver.generate(Sequence(prompt(4, 18), params), length)
        ahead = Sequence(prompt(4, 18), params)
        driver.join(ahead, 2)
        driver.step([(ahead, 18)])
        handles = []
        for n in range(length - 1):
            plan = StepPlan(50 + n, [], [], [], [], [Row(2, 18 + n, 1, True)], pack([SAMPLED]))
            handles.append(runner.launch(plan))
            runner.sample(handles[-1], {})
            if n:  # the one before is collected after the next one was launched
                ahead.tokens += runner.collect(handles[n - 1]).tokens[0]
        ahead.tokens += runner.collect(handles[-1]).tokens[0]
        assert ahead.output == expected
        driver.leave(ahead)
        driver.step([])
