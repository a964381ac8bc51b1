"""RMSNorm (arXiv 1910.07467), alone and fused with the residual addition before it."""

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from agentserve_kernels.scalar import FAST
from agentserve_kernels.tensors import PARALLEL_ROWS, check


def _rows(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    size = residual.shape[1]
    for row in prange(residual.shape[0]):
        square = np.float32(0)
        for i in range(size):
            value = residual[row, i] + delta[row, i]
            residual[row, i] = value
            square += value * value
        scale = np.float32(1) / np.sqrt(square / np.float32(size) + eps)
        for i in range(size):
            out[row, i] = residual[row, i] * scale * weight[i]


_serial = njit(fastmath=FAST, nogil=True, cache=True)(_rows)
_parallel = njit(parallel=True, fastmath=FAST, nogil=True, cache=True)(_rows)


@njit(nogil=True, cache=True)
def norm_rows(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """Do what `add_rms_norm` does, on arrays; callable from numba."""
    if residual.shape[0] < PARALLEL_ROWS:
        _serial(residual, delta, weight, eps, out)
    else:
        _parallel(residual, delta, weight, eps, out)


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Add `delta` to `residual` in place, write its RMSNorm to `out` and return that.

    residual, delta, out: [T, hidden]; weight: [hidden]; all float32.
    """
    shape = (residual.shape[0], residual.shape[1])
    check("residual", residual, shape, torch.float32)
    check("delta", delta, shape, torch.float32)
    check("weight", weight, shape[1:], torch.float32)
    check("out", out, shape, torch.float32)
    norm_rows(residual.numpy(), delta.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out
