import numpy as np
import pytest
import runner_cases
import torch
from runner_cases import FEATURES, VOCAB, prompt
from runner_driver import Driver, Sequence
from tiny_models import load_decoder, save_random

from agentserve.model.build import load_runner
from agentserve.model.runner import TorchRunner, model_identity


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module", autouse=True)
def reference(directory):
    return save_random("llama", directory)


@pytest.fixture
def runner(directory):
    decoder = load_decoder(directory, num_blocks=40)
    return TorchRunner(decoder, model="tiny", identity="x", max_slots=8)


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


def test_batched_sequences_give_the_tokens_that_each_gives_alone(runner):
    runner_cases.batched_sequences_give_the_tokens_that_each_gives_alone(runner)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plain_neighbour_is_not_touched(runner, feature):
    runner_cases.a_plain_neighbour_is_not_touched(runner, feature)


@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "grammar"])
def test_a_feature_gives_the_same_tokens_after_a_preemption(runner, feature):
    runner_cases.a_feature_gives_the_same_tokens_after_a_preemption(runner, feature)


@pytest.mark.parametrize(
    "case",
    [
        runner_cases.a_mask_binds_its_row_only,
        runner_cases.a_mask_that_allows_nothing_leaves_its_row_without_a_token,
        runner_cases.rows_that_do_not_reach_the_end_give_no_token,
        runner_cases.a_drop_of_another_generation_is_refused,
    ],
)
def test_rows_and_slots(runner, case):
    case(runner)


def test_log_probabilities_are_those_of_transformers(runner, reference):
    def theirs(tokens):
        with torch.no_grad():
            return reference(torch.tensor([tokens])).logits[0, -1].numpy()

    runner_cases.log_probabilities_are_the_model_s_own(runner, theirs)


def test_a_row_with_a_non_finite_logit_fails_alone(runner):
    cache = runner._decoder.cache
    runner_cases.a_row_with_a_non_finite_logit_fails_alone(runner, cache)


def test_a_copied_block_is_as_good_as_the_original(runner):
    cache = runner._decoder.cache
    runner_cases.a_copied_block_is_as_good_as_the_original(runner, cache)


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
