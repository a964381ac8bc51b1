"""The real model: what moving KV changes (nothing), and computing it again (little)."""

import exactness_runs as runs
import pytest
from tokenizers import Tokenizer

from agentserve.model.build import load_runner
from agentserve.model.prepare import prepare

pytestmark = pytest.mark.model

TURNS = 12  # `make exactness` runs 100
SEED = 1


@pytest.fixture(scope="module")
def directory():
    return prepare("smollm2-135m")


@pytest.fixture(scope="module")
def runner(directory):
    options = {"directory": str(directory), "dtype": "float32"}
    return load_runner({**options, "kv_bytes": 64 << 20, "host_bytes": 64 << 20})


@pytest.fixture(scope="module")
def turns(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return runs.script(tokenizer, TURNS, SEED)


@pytest.fixture(scope="module")
def reference(runner, turns):
    return runs.untouched(runner, turns)


def test_a_session_that_is_offloaded_after_every_turn_is_equal_bit_by_bit(runner, turns, reference):
    runs.compare_moved(reference, runs.offloaded(runner, turns))


def test_forks_that_are_restored_are_equal_bit_by_bit_to_forks_of_what_stayed(runner, turns):
    stayed = runs.untouched(runner, turns, forks=True)
    runs.compare_moved(stayed, runs.offloaded(runner, turns, forks=True))


def test_host_copies_lost_at_random_change_logits_within_the_bounds(runner, turns, reference):
    again = runs.with_losses(runner, turns, SEED, reference.outputs)
    assert again.from_host > 0
    runs.compare_recomputed(reference, again)


def test_preemptions_at_random_change_logits_within_the_bounds(runner, turns, reference):
    runs.compare_recomputed(reference, runs.preempted(runner, turns, SEED, reference.outputs))


def test_preemptions_by_demotion_lose_nothing_and_stay_within_the_bounds(runner, turns, reference):
    runs.compare_demoted(reference, runs.demoted(runner, turns, SEED, reference.outputs))


def test_in_bfloat16_too_a_session_that_is_offloaded_is_equal_bit_by_bit(directory, turns):
    options = {"directory": str(directory), "dtype": "bfloat16"}
    halves = load_runner({**options, "kv_bytes": 32 << 20, "host_bytes": 32 << 20})
    some = turns[:4]
    runs.compare_moved(runs.untouched(halves, some), runs.offloaded(halves, some))


def test_a_single_wrong_value_of_kv_is_noticed(runner, turns, reference):
    broken = runs.Conversation(runner, host=True)
    for new, count in turns[:2]:
        broken.turn(new, count)
        runner._decoder.cache[:, 3, 0, 0, 5, 0] += 1e-3
    assert broken.trace.digests[0] == reference.digests[0]
    assert broken.trace.digests[1] != reference.digests[1]
