import numpy as np
import pytest
import torch

from agentserve.model.logprobs import logprob_rows, read_rows, token_logprobs


def right(logits, token, count):
    values = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    best = sorted(range(len(logits)), key=lambda one: (-values[one], one))[:count]
    return values[token].item(), best, values[best].tolist()


@pytest.mark.parametrize("count", [0, 1, 5, 20, 49])
def test_both_ways_are_the_log_softmax_and_the_likeliest_in_order(count):
    logits = np.random.default_rng(count).normal(0, 9, (4, 48)).astype(np.float32)
    tokens = [0, 47, 20, int(logits[3].argmax())]
    rows = logprob_rows(torch.from_numpy(logits), torch.tensor(tokens), count)
    read = read_rows(rows.numpy(), [count] * 4)
    for row, token, other in zip(logits, tokens, read, strict=True):
        logprob, top, values = right(row, token, count)
        for told in (token_logprobs(row, token, count), other):
            assert told.logprob == pytest.approx(logprob, abs=1e-5)
            assert told.top == top
            assert told.top_logprobs == pytest.approx(values, abs=1e-5)


def test_of_equal_logits_the_lower_token_comes_first_however_many_are_cut_off():
    logits = np.array([1.0, 3.0, 3.0, 0.0, 3.0, 3.0], np.float32)
    assert token_logprobs(logits, 3, 3).top == [1, 2, 4]
    assert token_logprobs(logits, 3, 5).top == [1, 2, 4, 5, 0]


def test_each_row_gets_as_many_as_it_has_asked_for():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    rows = logprob_rows(logits, torch.tensor([1, 2, 3]), 7).numpy()
    assert [len(told.top) for told in read_rows(rows, [0, 7, 2])] == [0, 7, 2]


def test_logits_far_below_the_best_one_stay_finite():
    told = token_logprobs(np.array([80.0, -3e38, 0.0], np.float32), 1, 2)
    assert told.logprob == pytest.approx(-3e38)
    assert told.top_logprobs == pytest.approx([0.0, -80.0], abs=1e-5)
