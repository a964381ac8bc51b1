"""Each sampling option against a plain reference that works token by token on Python floats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.engine.plan import SamplingParams
from agentserve.model.sampler import TokenCounts, allowed_tokens, sample, uniform

VOCAB = 12


def reference_distribution(logits, params, prompt=(), output=(), allowed=None):
    """Return {token: probability} after all filters, by the definitions."""
    scores = {token: float(value) for token, value in enumerate(logits)}
    for token in scores:
        if token in prompt or token in output:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        if token in output:
            scores[token] -= params.presence_penalty
            scores[token] -= params.frequency_penalty * list(output).count(token)
        scores[token] += params.logit_bias.get(token, 0.0)
    if allowed is not None:
        scores = {token: score for token, score in scores.items() if token in allowed}
    top = max(scores.values())
    if params.temperature == 0:
        return {min(token for token, score in scores.items() if score == top): 1.0}
    weights = {t: math.exp((score - top) / params.temperature) for t, score in scores.items()}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, kept, mass = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        if kept and params.top_p < 1 and mass >= params.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    kept = [token for token in kept if weights[token] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def packed(allowed):
    bits = np.zeros(32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def draws(logits, params, count, **options):
    return [sample(logits, params, position, **options) for position in range(count)]


def agrees(logits, params, prompt=(), output=(), allowed=None, count=4000):
    """Assert that the draws have the reference's support and, within 5 sigma, its frequencies."""
    expected = reference_distribution(logits, params, prompt, output, allowed)
    counts = None
    if prompt or output:
        counts = TokenCounts(VOCAB, len(prompt))
        counts.add([*prompt, *output], 0)
    mask = None if allowed is None else packed(allowed)
    drawn = draws(logits, params, count, counts=counts, mask=mask)
    assert set(drawn) <= set(expected)
    for token, share in expected.items():
        sigma = math.sqrt(share * (1 - share) / count)
        assert abs(drawn.count(token) / count - share) <= 5 * sigma + 1e-9


@pytest.fixture
def logits():
    return np.random.default_rng(5).normal(0, 1.5, VOCAB).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 50},
        {"top_p": 0.0},
        {"top_p": 0.4},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
        {"logit_bias": {3: 4.0, 0: -100.0}},
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
    ],
)
def test_draws_follow_the_reference(logits, options):
    agrees(logits, SamplingParams(**{"temperature": 1.0, "seed": 11, **options}))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_follow_the_reference(logits, options, temperature):
    params = SamplingParams(temperature=temperature, seed=4, **options)
    assert params.needs_history
    agrees(logits, params, prompt=[1, 2, 2, 9], output=[2, 5, 5, 5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_leaves_only_what_it_allows(logits, temperature):
    agrees(logits, SamplingParams(temperature=temperature, seed=2), allowed={0, 4, 11})


def test_a_mask_that_allows_nothing_gives_no_token(logits):
    assert sample(logits, SamplingParams(), 3, mask=packed(set())) is None


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest():
    allowed = allowed_tokens(b"\xff\xff\xff\xff", 40)
    assert allowed.tolist() == [True] * 32 + [False] * 8


def test_ties_go_to_the_lower_token():
    flat = np.zeros(VOCAB, np.float32)
    assert sample(flat, SamplingParams(), 0) == 0
    drawn = draws(flat, SamplingParams(temperature=1.0, top_k=3, seed=1), 200)
    assert set(drawn) == {0, 1, 2}


def test_the_logits_are_not_changed(logits):
    before = logits.copy()
    counts = TokenCounts(VOCAB, 0)
    counts.add([1, 2], 0)
    params = SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={1: 5.0})
    sample(logits, params, 0, counts=counts, mask=packed({1, 2, 3}))
    assert np.array_equal(before, logits)


def test_output_counts_begin_where_the_prompt_ends():
    counts = TokenCounts(VOCAB, 3)
    counts.add([1, 1], 0)
    counts.add([1, 4, 4], 2)
    assert counts.seen.nonzero()[0].tolist() == [1, 4]
    assert counts.output[[1, 4]].tolist() == [0, 2]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
def test_a_draw_depends_on_seed_and_position_alone(seed, position):
    first = uniform(seed, position)
    uniform(seed + 1, position), uniform(seed, position + 1)
    assert 0 <= first < 1
    assert uniform(seed, position) == first


def test_neighbouring_seeds_and_positions_draw_unalike():
    values = np.array([[uniform(seed, p) for p in range(60)] for seed in range(60)])
    assert np.unique(values).size == values.size
    assert abs(values.mean() - 0.5) < 0.03
    for left, right in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.08
