import random
from array import array

import numpy as np
import pytest
import torch
from runner_driver import Driver, Sequence
from tiny_models import load_decoder, save_random

from agentserve.engine.plan import Copy, SamplingParams, SlotDrop, StepPlan
from agentserve.model.build import load_runner
from agentserve.model.runner import TorchRunner, model_identity

VOCAB = 199


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random("llama", path)
    return path


@pytest.fixture
def runner(directory):
    decoder = load_decoder(directory, num_blocks=40)
    return TorchRunner(decoder, model="tiny", identity="x", max_slots=8)


@pytest.fixture
def driver(runner):
    return Driver(runner)


def prompt(seed, length):
    return random.Random(seed).choices(range(VOCAB), k=length)


def mask_of(tokens):
    words = array("I", [0] * (VOCAB // 32 + 1))
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return words.tobytes()


def test_info_describes_the_model_and_its_memory(directory):
    runner = load_runner({"directory": str(directory), "kv_bytes": 1 << 20, "dtype": "float32"})
    info = runner.info
    assert (info.vocab_size, info.max_context, info.max_slots) == (VOCAB, 512, 64)
    assert info.groups[0].block_bytes == 3 * 2 * 2 * info.block_size * 24 * 4
    assert info.num_blocks == (1 << 20) // info.groups[0].block_bytes
    halves = load_runner({"directory": str(directory), "kv_bytes": 1 << 20})
    assert halves.info.dtype == "bfloat16"
    assert halves.info.groups[0].block_bytes * 2 == info.groups[0].block_bytes
    assert halves.info.num_blocks == (1 << 20) // halves.info.groups[0].block_bytes
    assert halves.info.identity != info.identity


def test_memory_for_fewer_than_64_tokens_is_refused(directory):
    with pytest.raises(ValueError, match="holds 0 blocks, fewer than 2"):
        load_runner({"directory": str(directory), "kv_bytes": 1000})


def test_identity_changes_with_the_weights(directory, tmp_path):
    save_random("llama", tmp_path, seed=1)
    ids = {model_identity(path, torch.float32) for path in (directory, tmp_path)}
    assert len(ids) == 2


def test_batched_sequences_give_the_tokens_that_each_gives_alone(runner, driver):
    prompts = [prompt(seed, 5 + 13 * seed) for seed in range(5)]
    alone = [driver.generate(Sequence(tokens), 12) for tokens in prompts]
    together = [Sequence(tokens) for tokens in prompts]
    for slot, sequence in enumerate(together):
        driver.join(sequence, slot + 2)
    chunks = random.Random(2)
    while any(len(sequence.output) < 12 for sequence in together):
        work = []
        for sequence in together:
            missing = len(sequence.tokens) - sequence.computed
            if len(sequence.output) < 12:
                work.append((sequence, min(missing, chunks.randint(1, 9))))
        driver.step(work)
    assert [sequence.output for sequence in together] == alone
    assert len({token for tokens in alone for token in tokens}) > 8, (
        "constant output would prove nothing"
    )


FEATURES = {
    "temperature": SamplingParams(temperature=1.3, seed=3),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.5, seed=3),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3, seed=3),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "presence": SamplingParams(presence_penalty=2.0),
    "frequency": SamplingParams(frequency_penalty=2.0),
    "bias": SamplingParams(logit_bias={7: 50.0}),
    "grammar": SamplingParams(),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plain_neighbour_is_not_touched(driver, feature):
    """A request with a feature comes and goes at every step, slots permuted: B is as alone."""
    plain = prompt(1, 20)
    alone = driver.generate(Sequence(plain), 6)
    masks = {0: mask_of([3, 5])} if feature == "grammar" else {}
    for leaving in range(1, 7):
        for slots in ((0, 1), (1, 0), (5, 2)):
            neighbour = Sequence(prompt(2, 9), FEATURES[feature])
            subject = Sequence(plain)
            driver.join(neighbour, slots[0])
            driver.join(subject, slots[1])
            for step in range(6):
                if step == leaving:
                    driver.leave(neighbour)
                    driver.release(neighbour)
                work = [(subject, len(subject.tokens) - subject.computed)]
                if step < leaving:
                    work.insert(0, (neighbour, len(neighbour.tokens) - neighbour.computed))
                driver.step(work, masks if step < leaving else {})
            assert subject.output == alone
            if step < leaving:
                driver.leave(neighbour)
                driver.release(neighbour)
            driver.leave(subject)
            driver.release(subject)


@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "grammar"])
def test_a_feature_gives_the_same_tokens_after_a_preemption(driver, feature):
    expected = driver.generate(Sequence(prompt(4, 18), FEATURES[feature]), 10)
    again = Sequence(prompt(4, 18), FEATURES[feature])
    driver.join(again, 3)
    while len(again.output) < 10:
        driver.step([(again, len(again.tokens) - again.computed)])
        if len(again.output) == 5:
            driver.leave(again)
            driver.release(again)
            again.computed = 0
            driver.join(again, 1)
    assert again.output == expected


def test_a_mask_binds_its_row_only(driver):
    masked, free = Sequence(prompt(5, 7)), Sequence(prompt(6, 8))
    driver.join(masked, 0)
    driver.join(free, 1)
    result = driver.step([(free, 8), (masked, 7)], {1: mask_of([42])})
    assert result.tokens[1] == [42]
    driver.leave(free)
    assert driver.generate(Sequence(prompt(6, 8)), 1, slot=1) == result.tokens[0]


def test_rows_that_do_not_reach_the_end_give_no_token(driver):
    sequence = Sequence(prompt(7, 30))
    driver.join(sequence, 0)
    assert driver.step([(sequence, 10)]).tokens == [[]]
    assert driver.step([(sequence, 19)]).tokens == [[]]
    assert len(driver.step([(sequence, 1)]).tokens[0]) == 1


def test_a_row_with_a_non_finite_logit_fails_alone(runner, driver):
    good, bad = Sequence(prompt(8, 10)), Sequence(prompt(9, 10))
    driver.join(good, 0)
    driver.join(bad, 1)
    driver.step([(good, 10), (bad, 10)])
    runner._decoder.cache[bad.blocks[0], 1, 0, 0, 3] = float("nan")
    result = driver.step([(bad, 1), (good, 1)])
    assert result.finite == [False, True]
    assert result.tokens[0] == []
    driver.leave(good)
    assert driver.generate(Sequence(prompt(8, 10)), 2, slot=4) == good.output


def test_a_copied_block_is_as_good_as_the_original(runner, driver):
    first = Sequence(prompt(3, 24))
    expected = driver.generate(Sequence(prompt(3, 24)), 5)
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
    runner._decoder.cache[first.blocks[1]] = 7.0
    while len(fork.output) < 5:
        driver.step([(fork, len(fork.tokens) - fork.computed)])
    assert fork.output == expected


def test_a_drop_of_another_generation_is_refused(runner, driver):
    driver.join(Sequence(prompt(1, 3)), 0)
    driver.step([])
    with pytest.raises(ValueError, match="generation"):
        runner.launch(StepPlan(5, [SlotDrop(0, 77)], [], [], [], [], b""))


def test_block_ids_are_multiplied_in_64_bits(directory):
    """Element offsets beyond 2**31: the cache is 9 GB of address space, of which KBs are used."""
    decoder = load_decoder(directory, num_blocks=2_000_000, dtype=torch.bfloat16)
    assert decoder.cache.numel() > 2**32
    runner = TorchRunner(decoder, model="tiny", identity="x", max_slots=2)
    far, near = Driver(runner), Driver(runner)
    far.free_blocks = list(range(1_999_000, 2_000_000))
    near.free_blocks = [5, 4, 3, 2, 1]
    tokens = prompt(12, 40)
    assert far.generate(Sequence(tokens), 4) == near.generate(Sequence(tokens), 4)
    assert np.isfinite(decoder.cache[1_999_999].float().numpy()).all()
