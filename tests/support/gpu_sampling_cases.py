"""Cases of sampling on the GPU."""

import math

import torch
from agentserve_kernels.gpu.sampling import sample
from agentserve_kernels.gpu.sampling_rows import DTYPES, SamplingRows, sample_reference
from gpu_row_cases import normal


def some(device):
    """How many rows a case draws for: the interpreter needs 0.1 s for each."""
    return 3 if device == "cpu" else 200


def rows_of(device, count, **values):
    """Greedy rows at positions 0, 1, ..., changed by `values`: one number or one a row."""
    defaults = dict.fromkeys(DTYPES, 0.0) | {"top_p": 1.0, "position": list(range(count))}
    columns = {}
    for name, value in (defaults | values).items():
        column = value if isinstance(value, list) else [value] * count
        columns[name] = torch.tensor(column, dtype=DTYPES[name], device=device)
    return SamplingRows(**columns)


def drawn(logits, rows, added=None, mask=None):
    tokens = torch.full((logits.shape[0],), -7, dtype=torch.int32, device=logits.device)
    finite = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    sample(logits, rows, tokens, finite, added, mask)
    return tokens, finite


def check(logits, rows, added=None, mask=None):
    """The tokens are the reference's; returns them."""
    tokens, finite = drawn(logits, rows, added, mask)
    expected, expected_finite = sample_reference(logits, rows, added, mask)
    assert tokens.tolist() == expected.tolist()
    assert finite.tolist() == expected_finite.tolist()
    return tokens


def packed(allowed):
    """bool [S, vocab] as a mask."""
    words = torch.zeros((allowed.shape[0], -(-allowed.shape[1] // 32)), dtype=torch.int64)
    for token in range(allowed.shape[1]):
        words[:, token // 32] |= allowed[:, token].long() << token % 32
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def greedy_takes_the_first_of_the_highest(device):
    for dtype in (torch.float32, torch.bfloat16):
        logits = normal(device, 4, 100, dtype=dtype)
        logits[1, [30, 70]] = 50.0
        logits[2, [0, 99]] = 50.0
        tokens = check(logits, rows_of(device, 4))
        assert tokens[1:3].tolist() == [30, 0]


def each_filter_leaves_what_the_reference_leaves(device):
    count = some(device)
    logits = normal(device, count, 70) * 3
    for filters in (
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 500},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1e-40},
    ):
        check(logits, rows_of(device, count, **{"temperature": 0.8, "seed": 5} | filters))


def among_equals_the_filters_keep_the_lowest_ids(device):
    count = 2 * some(device)
    logits = torch.zeros((count, 33), device=device)
    logits[:, 20] = 1.0
    kept = {
        "top_k": (4, {0, 1, 2, 20}),
        "top_p": (0.15, {0, 1, 2, 20}),  # e / (e + 32) = 0.078, and 0.029 for each of the others
    }
    for name, (value, expected) in kept.items():
        tokens = check(logits, rows_of(device, count, temperature=1.0, seed=3, **{name: value}))
        assert set(tokens.tolist()) <= expected
    both = rows_of(device, some(device), temperature=1.0, seed=3, top_k=6, top_p=0.5)
    assert set(check(logits[: some(device)], both).tolist()) <= {0, 1, 2, 3, 4, 20}


def rows_of_one_batch_differ_in_everything(device):
    logits = normal(device, 8, 65, seed=9) * 2
    many = rows_of(
        device,
        8,
        temperature=[0.0, 0.3, 1.0, 4.0] * 2,
        top_k=[0, 3, 0, 10, 64, 65, 0, 2],
        top_p=[1.0, 1.0, 0.5, 0.9] * 2,
        min_p=[0.0, 0.2] * 4,
        seed=[2**40 + 1, -3, 0, 7] * 2,
        position=[2**33 + i for i in range(8)],
    )
    tokens = check(logits, many)
    turned = SamplingRows(**{name: getattr(many, name).flip(0).contiguous() for name in DTYPES})
    again, _ = drawn(logits.flip(0).contiguous(), turned)
    assert again.flip(0).tolist() == tokens.tolist()


def penalties_and_masks_decide_before_the_filters(device):
    logits = normal(device, 4, 70, seed=2)
    added = normal(device, 4, 70, seed=3) * 2
    allowed = normal("cpu", 4, 70, seed=4) > 0.5
    mask = packed(allowed).to(device)
    for temperature in (0.0, 1.0):
        rows = rows_of(device, 4, temperature=temperature, top_p=0.9, seed=1)
        tokens = check(logits, rows, added, mask)
        assert allowed[torch.arange(4), tokens.long().cpu()].all()
        check(logits, rows, added)
        check(logits, rows, None, mask)


def rows_without_a_token_say_so(device):
    logits = normal(device, 5, 40)
    logits[0, 7], logits[1, 39], logits[2, 0] = math.nan, math.inf, -math.inf
    allowed = torch.ones((5, 40), dtype=torch.bool)
    allowed[3] = False
    for temperature in (0.0, 1.0):
        rows = rows_of(device, 5, temperature=temperature, top_k=3)
        tokens = check(logits, rows, None, packed(allowed).to(device))
        assert tokens[:4].tolist() == [-1] * 4
        assert tokens[4] >= 0


def draws_follow_the_weights(device):
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 80 if device == "cpu" else 4000
    logits = weights.log().repeat(count, 1).to(device)
    tokens, _ = drawn(logits, rows_of(device, count, temperature=1.0, seed=11))
    shares = torch.bincount(tokens.long().cpu(), minlength=4) / count
    # Four standard deviations of each share.
    assert ((shares - weights).abs() < 4 * (weights * (1 - weights) / count).sqrt()).all()


CASES = (
    greedy_takes_the_first_of_the_highest,
    each_filter_leaves_what_the_reference_leaves,
    among_equals_the_filters_keep_the_lowest_ids,
    rows_of_one_batch_differ_in_everything,
    penalties_and_masks_decide_before_the_filters,
    rows_without_a_token_say_so,
    draws_follow_the_weights,
)
