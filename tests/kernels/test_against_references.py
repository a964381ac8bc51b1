import numpy as np
import pytest
import torch
from agentserve_kernels.activation import silu_mul
from agentserve_kernels.kv_write import kv_write
from agentserve_kernels.linear import linear, pack
from agentserve_kernels.norm import add_rms_norm
from agentserve_kernels.paged_attention import paged_attention, plan_attention
from agentserve_kernels.reference import (
    kv_write_reference,
    linear_reference,
    paged_decode_reference,
    paged_prefill_reference,
    rms_norm_reference,
    silu_mul_reference,
)
from agentserve_kernels.scalar import narrow, power
from agentserve_kernels.tensors import (
    Chunk,
    DecodeRows,
    HeadNorm,
    Pages,
    Placement,
    Rotary,
    Workspace,
    view,
)
from numba import njit

BLOCK, LAYERS, DIM = 16, 2, 32
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def random():
    return torch.Generator().manual_seed(7)


def paged(random, dtype, kv_heads, lengths, block=BLOCK, dim=DIM):
    """A cache filled at random, and tables that name its blocks in a shuffled order."""
    needed = [-(-length // block) for length in lengths]
    blocks = torch.randperm(sum(needed) + 3, generator=random)
    shape = (sum(needed) + 3, LAYERS, 2, kv_heads, block, dim)
    cache = torch.randn(shape, generator=random).to(dtype)
    tables = torch.zeros((len(lengths), max(needed)), dtype=torch.int32)
    for slot, count in enumerate(needed):
        tables[slot, :count], blocks = blocks[:count], blocks[count:]
    return Pages(cache, 1, tables)


NOBODY = DecodeRows(*(torch.empty(0, dtype=torch.int64) for _ in range(3)))


def paged_decode(query, pages, decode, out, workspace):
    paged_attention(query, pages, decode, (), out, workspace)


def paged_prefill(query, pages, chunk, out, workspace):
    paged_attention(query, pages, NOBODY, (chunk,), out, workspace)


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 40])
@pytest.mark.parametrize("inner", [48, 1100])
def test_linear_equals_its_reference(random, dtype, rows, inner):
    x = torch.randn((rows, inner), generator=random)
    weight = torch.randn((50, inner), generator=random).to(dtype)
    bias = torch.randn(50, generator=random)
    got = linear(x, pack(weight), bias, torch.empty((rows, 50)))
    close(got, linear_reference(x, weight, bias), 1e-4)


def test_a_row_of_linear_does_not_depend_on_its_neighbours(random):
    x = torch.randn((40, 1100), generator=random)
    weight = pack(torch.randn((400, 1100), generator=random).bfloat16())
    whole = linear(x, weight, None, torch.empty((40, 400)))
    for first, end in ((0, 1), (1, 3), (3, 8), (11, 40)):
        some = linear(x[first:end].contiguous(), weight, None, torch.empty((end - first, 400)))
        assert torch.equal(some, whole[first:end])


@pytest.mark.parametrize("rows", [1, 30])
def test_add_rms_norm_equals_its_reference(random, rows):
    residual, delta = torch.randn((2, rows, 48), generator=random)
    weight = torch.randn(48, generator=random)
    expected = residual + delta
    got = add_rms_norm(residual, delta, weight, 1e-5, torch.empty_like(residual))
    close(residual, expected, 0)
    close(got, rms_norm_reference(expected, weight, 1e-5))


@pytest.mark.parametrize("rows", [1, 30])
def test_silu_mul_equals_its_reference_also_far_from_zero(random, rows):
    gate_up = torch.randn((rows, 96), generator=random) * 40
    got = silu_mul(gate_up, torch.empty((rows, 48)))
    close(got, silu_mul_reference(gate_up), 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [1, 21])
def test_kv_write_equals_its_reference(random, dtype, normed, rows):
    pages = paged(random, dtype, 2, [rows])
    qkv = torch.randn((rows, (6 + 2 * 2) * DIM), generator=random)
    positions = torch.arange(rows)
    place = Placement(positions, pages.tables[0][positions // BLOCK].long())
    angles = torch.outer(torch.arange(64.0), torch.rand(DIM // 2, generator=random))
    rotary = Rotary(angles.cos(), angles.sin())
    weights = torch.rand((2, DIM), generator=random)
    norm = HeadNorm(weights[0], weights[1], 1e-6) if normed else None
    expected_pages = Pages(pages.cache.clone(), 1, pages.tables)
    expected = kv_write_reference(qkv.clone(), expected_pages, place, rotary, norm)
    got = kv_write(qkv, pages, place, rotary, norm, torch.empty((rows, 6, DIM)))
    close(got, expected)
    # One rounding step of bfloat16 may differ where the float32 values differ in their last bit.
    close(
        pages.cache.float(), expected_pages.cache.float(), 2e-5 if dtype is torch.float32 else 2**-7
    )


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads"),
    [(dtype, *heads) for dtype in DTYPES for heads in ((6, 2), (4, 4), (5, 1), (14, 2))],
)
def test_paged_decode_equals_its_reference_for_ragged_lengths(random, dtype, heads, kv_heads):
    lengths = [1, BLOCK, BLOCK + 1, 13 * BLOCK - 1]
    pages = paged(random, dtype, kv_heads, lengths)
    order = torch.tensor([3, 0, 2, 1])
    decode = DecodeRows(torch.tensor([1, 2, 4, 5]), order, torch.tensor(lengths)[order])
    query = torch.randn((6, heads, DIM), generator=random) * 3
    out = torch.full_like(query, 7.0)
    paged_decode(query, pages, decode, out, Workspace())
    close(out[decode.rows], paged_decode_reference(query, pages, decode))
    assert (out[[0, 3]] == 7.0).all(), "rows of other requests are not touched"


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "start", "count"),
    [
        (DTYPES[0], 6, 2, 0, 22),
        (DTYPES[1], 6, 2, 5, 22),
        (DTYPES[1], 6, 2, 3 * BLOCK, 1),
        (DTYPES[1], 4, 4, 700, 130),  # several spans of keys and several tiles of tokens
        (DTYPES[0], 5, 1, 470, 45),
    ],
)
def test_paged_prefill_equals_its_reference(random, dtype, heads, kv_heads, start, count):
    pages = paged(random, dtype, kv_heads, [start + count, 4])
    query = torch.randn((count + 3, heads, DIM), generator=random) * 3
    chunk = Chunk(slot=0, row=2, start=start, count=count)
    out = torch.full_like(query, 7.0)
    paged_prefill(query, pages, chunk, out, Workspace())
    close(out[2:-1], paged_prefill_reference(query, pages, chunk))
    assert (out[[0, 1, -1]] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block", "dim"), [(1, 8), (5, 100), (24, 64), (32, 128), (200, 64)])
def test_attention_takes_blocks_and_heads_of_any_size(random, dtype, block, dim):
    lengths = [1, 2, 64, 65, 410]
    pages = paged(random, dtype, 2, lengths, block, dim)
    query = torch.randn((205, 6, dim), generator=random)
    out = torch.empty_like(query)
    chunk = Chunk(slot=4, row=5, start=210, count=200)
    rows = torch.arange(5)
    decode = DecodeRows(rows, rows, torch.tensor(lengths))
    paged_decode(query, pages, decode, out, Workspace())
    paged_prefill(query, pages, chunk, out, Workspace())
    close(out[:5], paged_decode_reference(query, pages, decode))
    close(out[5:], paged_prefill_reference(query, pages, chunk))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 100), (4, 4, 32)])
def test_rows_that_share_a_prefix_attend_as_each_alone(random, dtype, heads, kv_heads, dim):
    lengths = [700, 701, 640, 641, 900, 350, 90, 1, 650]
    pages = paged(random, dtype, kv_heads, lengths, BLOCK, dim)
    pages.tables[1:6, :20] = pages.tables[0, :20]
    pages.tables[1:4, :40] = pages.tables[0, :40]  # all 640 tokens of one row, but for its last
    query = torch.randn((70, heads, dim), generator=random) * 3
    rows = torch.arange(50, 59)
    decode = DecodeRows(rows, torch.arange(9), torch.tensor(lengths))
    chunks = (Chunk(8, 2, 600, 45), Chunk(4, 60, 300, 10))
    out = torch.full_like(query, 7.0)
    shared = plan_attention(decode, chunks, pages.tables, BLOCK)[0][3]
    assert shared.tolist() == [320] * 6 + [0] * 3
    paged_attention(query, pages, decode, chunks, out, Workspace())
    close(out[rows], paged_decode_reference(query, pages, decode))
    close(out[2:47], paged_prefill_reference(query, pages, chunks[0]))
    close(out[60:], paged_prefill_reference(query, pages, chunks[1]))
    assert (out[[0, 1, 47, 49, 59]] == 7.0).all()


def test_a_chunk_and_single_tokens_attend_alike(random):
    pages = paged(random, torch.float32, 2, [40])
    query = torch.randn((40, 6, DIM), generator=random)
    whole, single = torch.empty_like(query), torch.empty_like(query)
    paged_prefill(query, pages, Chunk(0, 0, 0, 40), whole, Workspace())
    rows = torch.arange(40)
    decode = DecodeRows(rows, torch.zeros_like(rows), rows + 1)
    paged_decode(query, pages, decode, single, Workspace())
    close(whole, single)


def test_a_nan_in_the_cache_reaches_the_rows_that_read_it_and_no_other(random):
    pages = paged(random, torch.bfloat16, 2, [40, 40])
    pages.cache[pages.tables[0, 1].item(), 1, 0, 1, 3, 5] = float("nan")
    query = torch.randn((42, 6, DIM), generator=random)
    out = torch.zeros_like(query)
    ones = torch.tensor([40, 41])
    decode = DecodeRows(ones, torch.tensor([0, 1]), torch.tensor([40, 40]))
    paged_decode(query, pages, decode, out, Workspace())
    paged_prefill(query, pages, Chunk(0, 0, 0, 40), out, Workspace())
    broken = out.isnan().any(-1)
    assert broken[40].tolist() == [False, False, False, True, True, True]
    assert not broken[41].any()
    assert not broken[: BLOCK + 3].any()
    assert broken[BLOCK + 3 : 40, 3:].all()


def test_power_is_accurate_over_its_range():
    x = np.linspace(-126, 126, 20_001).astype(np.float32)

    @njit
    def run(values):
        out = np.empty_like(values)
        for i in range(values.size):
            out[i] = power(values[i])
        return out

    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(run(x) / exact - 1)) < 3e-7
    assert run(np.array([-127, -1e30, -np.inf], np.float32)).tolist() == [0, 0, 0]
    assert np.isnan(run(np.array([np.nan], np.float32))[0])


def test_narrow_rounds_as_torch_does(random):
    values = torch.randn(4096, generator=random) * 1e3
    values[:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])

    @njit
    def run(source, out):
        for i in range(source.size):
            out[i] = narrow(out[i], source[i])

    out = torch.empty(4096, dtype=torch.bfloat16)
    run(values.numpy(), view(out))
    assert torch.equal(out[:2], values[:2].bfloat16())
    assert out[2].isnan()
    assert torch.equal(out[3:], values[3:].bfloat16())


def test_wrong_shapes_and_types_are_named(random):
    with pytest.raises(ValueError, match=r"out has shape \(1, 3\), expected \(1, 4\)"):
        linear(torch.ones(1, 2), pack(torch.ones(4, 2)), None, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        pack(torch.ones(4, 2).double())
    with pytest.raises(ValueError, match="gate_up is not contiguous"):
        silu_mul(torch.ones(8, 2).T, torch.ones(2, 4))
    query, pages = torch.ones(1, 5, DIM), paged(random, torch.float32, 2, [1])
    one = DecodeRows(torch.zeros(1).long(), torch.zeros(1).long(), torch.ones(1).long())
    with pytest.raises(ValueError, match="5 query heads do not share 2 KV heads"):
        paged_decode(query, pages, one, torch.empty_like(query), Workspace())
    with pytest.raises(ValueError, match="5 query heads do not share 2 KV heads"):
        paged_prefill(query, pages, Chunk(0, 0, 0, 1), torch.empty_like(query), Workspace())
