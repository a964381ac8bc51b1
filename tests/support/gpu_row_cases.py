"""Cases of the GPU kernels that work row by row, and of block copies."""

import torch
from agentserve_kernels.gpu.activation import silu_mul
from agentserve_kernels.gpu.blocks import (
    gather_blocks,
    gather_reference,
    scatter_blocks,
    scatter_reference,
)
from agentserve_kernels.gpu.kv_write import kv_write
from agentserve_kernels.gpu.norm import add_rms_norm, add_rms_norm_reference
from agentserve_kernels.reference import kv_write_reference, silu_mul_reference
from agentserve_kernels.tensors import HeadNorm, Pages, Placement, Rotary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 16


def close(actual, expected, dtype):
    """Within the rounding of what is stored in `dtype`."""
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=False
    )


def normal(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def silu_mul_equals_its_reference(device):
    for dtype in DTYPES:
        for rows, inner in ((3, 40), (1, 1100)):
            gate_up = normal(device, rows, 2 * inner, dtype=dtype) * 20
            out = silu_mul(gate_up, torch.empty((rows, inner), dtype=dtype, device=device))
            close(out, silu_mul_reference(gate_up.float()), dtype)


def add_rms_norm_equals_its_reference(device):
    for dtype in DTYPES:
        for with_delta in (True, False):
            residual = normal(device, 3, 72, dtype=dtype)
            delta = normal(device, 3, 72, dtype=dtype, seed=1) if with_delta else None
            weight = normal(device, 72, seed=2)
            out = torch.empty_like(residual)
            expected_residual, expected = residual.clone(), torch.empty_like(out)
            add_rms_norm_reference(expected_residual, delta, weight, 1e-5, expected)
            add_rms_norm(residual, delta, weight, 1e-5, out)
            close(residual, expected_residual, dtype)
            close(out, expected, dtype)


def one_kv_write(device, dtype, dim, normed):
    rows, heads, kv_heads, layers, blocks = 5, 6, 2, 2, 4
    qkv = normal(device, rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    # The last row fills the batch: it has no block.
    place = Placement(
        torch.tensor([0, 17, 31, 40, 3], device=device),
        torch.tensor([2, 0, 3, 1, -1], device=device),
    )
    angles = normal(device, 48, dim // 2, seed=1)
    rotary = Rotary(angles.cos(), angles.sin())
    norm = HeadNorm(normal(device, dim, seed=2), normal(device, dim, seed=3), 1e-6)
    shape = (blocks, layers, 2, kv_heads, BLOCK, dim)
    pages = Pages(
        torch.full(shape, 7.0, dtype=dtype, device=device), 1, torch.zeros((1, 1)).int().to(device)
    )
    expected = Pages(pages.cache.clone(), 1, pages.tables)
    query = torch.full((rows, heads, dim), 7.0, dtype=dtype, device=device)
    kv_write(qkv, pages, place, rotary, norm if normed else None, query)
    wanted = kv_write_reference(
        qkv[:-1].float(),
        expected,
        Placement(place.positions[:-1], place.blocks[:-1]),
        rotary,
        norm if normed else None,
    )
    close(query[:-1], wanted, dtype)
    assert (query[-1] == 7.0).all()
    close(pages.cache, expected.cache, dtype)
    assert torch.equal(pages.cache == 7.0, expected.cache == 7.0)


def kv_write_equals_its_reference(device):
    for dtype in DTYPES:
        for dim in (32, 20):
            for normed in (False, True):
                one_kv_write(device, dtype, dim, normed)


def blocks_come_back_from_the_staging_buffer_as_they_were(device):
    for dtype in DTYPES:
        cache = normal(device, 7, 2, 2, 3, BLOCK, 12, dtype=dtype)
        for ids_dtype in (torch.int32, torch.int64):
            ids = torch.tensor([5, 0, 3], dtype=ids_dtype, device=device)
            staging = torch.empty_like(cache[:3])
            expected = torch.empty_like(staging)
            gather_blocks(cache, ids, staging)
            gather_reference(cache, ids, expected)
            assert torch.equal(staging, expected)
            target, wanted = torch.zeros_like(cache), torch.zeros_like(cache)
            scatter_blocks(staging, target, ids)
            scatter_reference(staging, wanted, ids)
            assert torch.equal(target, wanted)


def no_rows_are_no_work(device):
    silu_mul(torch.empty((0, 8), device=device), torch.empty((0, 4), device=device))
    nothing = torch.empty((0, 8), device=device)
    add_rms_norm(nothing, None, torch.ones(8, device=device), 1e-5, nothing)
    cache = torch.zeros((2, 1, 2, 1, BLOCK, 4), device=device)
    gather_blocks(cache, torch.empty(0, dtype=torch.int64, device=device), cache[:0])


CASES = (
    silu_mul_equals_its_reference,
    add_rms_norm_equals_its_reference,
    kv_write_equals_its_reference,
    blocks_come_back_from_the_staging_buffer_as_they_were,
    no_rows_are_no_work,
)
