"""Cases of the GPU's attention kernels.

Whatever was never written to the cache is NaN here, so that a read too far shows.
"""

import math

import torch
from agentserve_kernels.gpu.launch import Tuning
from agentserve_kernels.gpu.paged_attention import (
    Spans,
    paged_attention,
    paged_attention_reference,
)
from agentserve_kernels.gpu.paged_decode import SplitPlan, paged_decode, paged_decode_reference
from agentserve_kernels.tensors import DecodeRows, Pages, Workspace
from gpu_row_cases import BLOCK, close, normal

LAYERS, UNTOUCHED = 2, 123.0
SMALL = Tuning(rows=16, keys=16)  # several tiles even for short sequences


def dtypes(device):
    """The interpreter's products of bfloat16 are wrong (triton 3.7 to 3.9): not there."""
    exact = (torch.float32, torch.float16)
    return exact if device == "cpu" else (*exact, torch.bfloat16)


def paged(device, dtype, kv_heads, dim, lengths, seed=0):
    """Keys and values of random sequences, one a slot, their blocks in a shuffled order."""
    needed = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed))
    shape = (sum(needed) + 2, LAYERS, 2, kv_heads, BLOCK, dim)
    cache = torch.full(shape, math.nan, dtype=dtype)
    tables = torch.full((len(lengths), max(needed)), 10**6, dtype=torch.int32)
    for slot, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        tables[slot, :count], order = order[:count], order[count:]
        values = normal("cpu", length, LAYERS, 2, kv_heads, dim, dtype=dtype, seed=seed + slot + 1)
        for position in range(length):
            block = tables[slot, position // BLOCK].long()
            cache[block, :, :, :, position % BLOCK] = values[position]
    return Pages(cache.to(device), 1, tables.to(device))


def indices(device, *lists):
    return [torch.tensor(values, dtype=torch.int64, device=device) for values in lists]


def attend(query, pages, spans, window=0, tuning=None):
    out = torch.full(query.shape, UNTOUCHED, device=query.device)
    paged_attention(query, pages, spans, out, window, tuning)
    return out


def decode_rows(query, pages, decode, plan, window=0, tuning=None):
    out = torch.full(query.shape, UNTOUCHED, device=query.device)
    paged_decode(query, pages, decode, out, plan, Workspace(query.device), window, tuning)
    return out


def check_rows(actual, expected, rows, dtype):
    """The rows are as expected, and the others have not been written."""
    close(actual[rows], expected[rows], dtype)
    others = torch.ones(actual.shape[0], dtype=torch.bool, device=actual.device)
    others[rows] = False
    assert (actual[others] == UNTOUCHED).all()


def one_mix(device, dtype, heads, dim, window):
    """A token, a whole prompt, the end of a long prompt and a short chunk, with a gap of rows."""
    kv_heads, lengths = 2, [33, 21, 50, 5]
    rows, counts = [0, 1, 24, 61], [1, 21, 37, 2]
    pages = paged(device, dtype, kv_heads, dim, lengths)
    query = normal(device, 64, heads, dim)
    spans = Spans(*indices(device, rows, counts, [0, 1, 2, 3], lengths), max(counts))
    covered = [r for row, count in zip(rows, counts, strict=True) for r in range(row, row + count)]
    expected = paged_attention_reference(query, pages, spans, window)
    check_rows(attend(query, pages, spans, window, SMALL), expected, covered, dtype)


def mixed_spans_equal_their_reference(device):
    for dtype in dtypes(device):
        one_mix(device, dtype, heads=6, dim=32, window=0)


def mixed_spans_with_a_window_equal_their_reference(device):
    for window in (1, 7, 40):
        one_mix(device, torch.float32, heads=4, dim=16, window=window)


def heads_of_a_size_that_is_no_power_of_two_are_padded(device):
    one_mix(device, torch.float32, heads=2, dim=24, window=0)
    pages = paged(device, torch.float32, 1, 40, [70])
    decode = DecodeRows(*indices(device, [0], [0], [70]))
    query = normal(device, 1, 2, 40)
    for plan in (SplitPlan(1, 128), SplitPlan(3, 128)):
        expected = paged_decode_reference(query, pages, decode)
        close(decode_rows(query, pages, decode, plan), expected, torch.float32)


def default_tiles_at_head_sizes_64_and_128_equal_the_reference(device):
    for dim in (64, 128):
        for dtype in dtypes(device):
            pages = paged(device, dtype, 1, dim, [75])
            spans = Spans(*indices(device, [0], [70], [0], [75]), 70)
            query = normal(device, 70, 2, dim)
            close(
                attend(query, pages, spans), paged_attention_reference(query, pages, spans), dtype
            )
            decode = DecodeRows(*indices(device, [0], [0], [75]))
            for plan in (SplitPlan(1, 128), SplitPlan(2, 128)):
                expected = paged_decode_reference(query[:1], pages, decode)
                close(decode_rows(query[:1], pages, decode, plan), expected, dtype)


def one_token_batch(device, dtype, window):
    """Single tokens of several lengths, one of them only fills the batch, in each kind of split."""
    lengths = [1, 0, 16, 130, 270]
    pages = paged(device, dtype, 1, 16, [max(1, length) for length in lengths])
    decode = DecodeRows(*indices(device, [3, 0, 1, 5, 4], [0, 1, 2, 3, 4], lengths))
    query = normal(device, 7, 3, 16)
    expected = paged_decode_reference(query, pages, decode, window)
    for plan in (SplitPlan(1, 128), SplitPlan(3, 128), SplitPlan.fixed(128, 270)):
        got = decode_rows(query, pages, decode, plan, window)
        check_rows(got, expected, [0, 1, 3, 4, 5], dtype)


def single_tokens_equal_their_reference(device):
    for dtype in dtypes(device):
        one_token_batch(device, dtype, 0)


def single_tokens_with_a_window_equal_their_reference(device):
    for window in (20, 140):
        one_token_batch(device, torch.float32, window)


def a_row_has_the_same_bits_however_its_sequence_is_cut_into_chunks(device):
    for dtype in dtypes(device):
        pages = paged(device, dtype, 1, 16, [50, 33])
        query = normal(device, 50, 3, 16)
        whole = Spans(*indices(device, [0], [50], [0], [50]), 50)
        expected = attend(query, pages, whole, 0, SMALL)
        # The products of the interpreter round by the row of a tile: there only whole tiles (of 5).
        for cut in (5, 35) if device == "cpu" else (1, 5, 37):
            first = Spans(*indices(device, [0], [cut], [0], [cut]), cut)
            # The second chunk has a neighbour in the batch.
            second = Spans(
                *indices(device, [0, 50 - cut], [50 - cut, 4], [0, 1], [50, 33]), 50 - cut
            )
            rest = torch.cat((query[cut:], query[:4]))
            got = (attend(query, pages, first, 0, SMALL), attend(rest, pages, second, 0, SMALL))
            assert torch.equal(torch.cat((got[0][:cut], got[1][: 50 - cut])), expected), cut


def with_fixed_splits_a_single_token_has_the_same_bits_in_any_batch(device):
    for dtype in dtypes(device):
        for window in (0, 200):
            pages = paged(device, dtype, 1, 16, [300, 520])
            query = normal(device, 2, 3, 16)
            alone = DecodeRows(*indices(device, [0], [0], [300]))
            both = DecodeRows(*indices(device, [1, 0], [1, 0], [520, 300]))
            one = decode_rows(query, pages, alone, SplitPlan.fixed(128, 300), window)
            two = decode_rows(query, pages, both, SplitPlan.fixed(128, 520), window)
            assert torch.equal(one[0], two[0])


def a_row_that_is_not_finite_leaves_its_neighbours_alone(device):
    pages = paged(device, torch.float32, 1, 16, [40, 40])
    query = normal(device, 2, 3, 16)
    decode = DecodeRows(*indices(device, [0, 1], [0, 1], [40, 40]))
    expected = decode_rows(query, pages, decode, SplitPlan(1, 128))
    pages.cache[pages.tables[0, 0].long(), 1, 0, 0, 3] = math.nan
    for got in (
        decode_rows(query, pages, decode, SplitPlan(1, 128)),
        attend(query, pages, Spans(decode.rows, *indices(device, [1, 1], [0, 1], [40, 40]), 1)),
    ):
        assert got[0].isnan().all()
        close(got[1], expected[1], torch.float32)


CASES = (
    mixed_spans_equal_their_reference,
    mixed_spans_with_a_window_equal_their_reference,
    heads_of_a_size_that_is_no_power_of_two_are_padded,
    default_tiles_at_head_sizes_64_and_128_equal_the_reference,
    single_tokens_equal_their_reference,
    single_tokens_with_a_window_equal_their_reference,
    a_row_has_the_same_bits_however_its_sequence_is_cut_into_chunks,
    with_fixed_splits_a_single_token_has_the_same_bits_in_any_batch,
    a_row_that_is_not_finite_leaves_its_neighbours_alone,
)
