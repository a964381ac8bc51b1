"""SwiGLU's element-wise half (arXiv 2002.05202): silu(gate) * up.

Reference: `reference.silu_mul_reference`.
"""

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import STORAGE, Launch
from agentserve_kernels.tensors import check

TILE = 1024


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, TILE: tl.constexpr
) -> None:
    """Take TILE columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < size
    start = gate_up + row * 2 * size
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + size + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, product.to(out.dtype.element_ty), mask=inside)


def silu_mul_launch(gate_up: torch.Tensor, out: torch.Tensor) -> Launch:
    """Return the launch of `silu_mul`; raises as it does."""
    rows, inner = out.shape
    check("gate_up", gate_up, (rows, 2 * inner), *STORAGE)
    check("out", out, (rows, inner), *STORAGE)
    arguments = {"gate_up": gate_up, "out": out, "size": inner, "TILE": TILE}
    return Launch(silu_mul_kernel, (rows, triton.cdiv(inner, TILE)), arguments)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up to `out` and return it.

    gate_up: [T, 2 * inner], gate first; out: [T, inner]; float32, bfloat16 or float16 each, with
    float32 arithmetic. Raises ValueError for other shapes or dtypes.
    """
    silu_mul_launch(gate_up, out).run()
    return out
