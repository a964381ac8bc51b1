"""RMSNorm (arXiv 1910.07467), with the residual addition before it."""

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import STORAGE, Launch, Tuning
from agentserve_kernels.reference import rms_norm_reference
from agentserve_kernels.tensors import check

WIDEST = 32768  # of a row: a program holds one in its registers


def add_rms_norm_reference(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Do what `add_rms_norm` does, with torch operations."""
    if delta is not None:
        residual.copy_(residual.float() + delta.float())
    return out.copy_(rms_norm_reference(residual.float(), weight, eps))


@triton.jit
def add_rms_norm_kernel(  # noqa: PLR0913 - a kernel's arguments are flat
    residual: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Take one row; ADD: there is a delta."""
    columns = tl.arange(0, TILE)
    inside = columns < size
    start = tl.program_id(0).to(tl.int64) * size
    row = tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(delta + start + columns, mask=inside, other=0.0).to(tl.float32)
        stored = row.to(residual.dtype.element_ty)
        tl.store(residual + start + columns, stored, mask=inside)
        row = stored.to(tl.float32)  # what the next layer will read
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / size + eps)
    normed = row * scale * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + start + columns, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm_launch(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> Launch:
    """Return the launch of `add_rms_norm`; raises as it does."""
    rows, size = residual.shape
    check("residual", residual, (rows, size), *STORAGE)
    if delta is not None:
        check("delta", delta, (rows, size), *STORAGE)
    check("weight", weight, (size,), torch.float32)
    check("out", out, (rows, size), *STORAGE)
    if size > WIDEST:
        raise ValueError(f"rows of {size} are wider than {WIDEST}")
    tile = triton.next_power_of_2(size)
    arguments = {
        "residual": residual,
        "delta": residual if delta is None else delta,
        "weight": weight,
        "out": out,
        "size": size,
        "eps": eps,
        "ADD": delta is not None,
        "TILE": tile,
    }
    warps = min(16, max(1, tile // 512))
    return Launch(add_rms_norm_kernel, (rows,), arguments, Tuning(warps=warps))


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Add `delta` (None: nothing) to `residual` in place, write its RMSNorm to `out`, return that.

    residual, delta, out: [T, hidden], float32, bfloat16 or float16 each; weight: [hidden] float32.
    The norm is that of the residual as it is stored. Raises ValueError for other shapes or dtypes.
    """
    add_rms_norm_launch(residual, delta, weight, eps, out).run()
    return out
