"""SwiGLU's element-wise half (arXiv 2002.05202): silu(gate) * up."""

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from agentserve_kernels.scalar import exp32
from agentserve_kernels.tensors import PARALLEL_ROWS, check


def _rows(gate_up: Any, out: Any) -> None:
    size = out.shape[1]
    for row in prange(out.shape[0]):
        for i in range(size):
            gate = gate_up[row, i]
            out[row, i] = gate / (np.float32(1) + exp32(-gate)) * gate_up[row, size + i]


_serial = njit(nogil=True, cache=True, error_model="numpy")(_rows)
_parallel = njit(parallel=True, nogil=True, cache=True, error_model="numpy")(_rows)


@njit(nogil=True, cache=True)
def silu_rows(gate_up: Any, out: Any) -> None:
    """Do what `silu_mul` does, on arrays; callable from numba."""
    if out.shape[0] < PARALLEL_ROWS:
        _serial(gate_up, out)
    else:
        _parallel(gate_up, out)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up to `out` and return it.

    gate_up: [T, 2 * inner] float32, gate first; out: [T, inner] float32.
    """
    rows, inner = out.shape
    check("gate_up", gate_up, (rows, 2 * inner), torch.float32)
    check("out", out, (rows, inner), torch.float32)
    silu_rows(gate_up.numpy(), out.numpy())
    return out
