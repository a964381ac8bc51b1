"""Matrix product with stored float32 or bfloat16 weights and float32 arithmetic.

Decoding is bound by the weight bytes: a few rows are multiplied by a kernel that streams each
weight row once and widens it in registers. Many rows go to torch's GEMM; bfloat16 weights are then
widened into a reused buffer first, one matrix at a time, so that it stays in the last-level cache.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload

from agentserve_kernels.scalar import FAST, high_half, low_half, widen
from agentserve_kernels.tensors import FEW_ROWS, STORAGE, Workspace, check, view


@njit(parallel=True, fastmath=FAST, nogil=True, cache=True)
def _multiply_float32(weight: Any, x: Any, out: Any) -> None:
    rows, inner = x.shape
    for n in prange(weight.shape[0]):
        m = 0
        while m + 4 <= rows:
            a = b = c = d = np.float32(0)
            for k in range(inner):
                w = weight[n, k]
                a += w * x[m, k]
                b += w * x[m + 1, k]
                c += w * x[m + 2, k]
                d += w * x[m + 3, k]
            out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = a, b, c, d
            m += 4
        while m < rows:
            a = np.float32(0)
            for k in range(inner):
                a += weight[n, k] * x[m, k]
            out[m, n] = a
            m += 1


@njit(parallel=True, fastmath=FAST, nogil=True, cache=True)
def _multiply_bfloat16(pairs: Any, even: Any, odd: Any, out: Any) -> None:
    # A shift and a mask widen two packed weights in place; the inputs are split to match.
    rows, inner = even.shape
    for n in prange(pairs.shape[0]):
        m = 0
        while m + 4 <= rows:
            a = b = c = d = np.float32(0)
            for k in range(inner):
                low, high = low_half(pairs[n, k]), high_half(pairs[n, k])
                a += low * even[m, k] + high * odd[m, k]
                b += low * even[m + 1, k] + high * odd[m + 1, k]
                c += low * even[m + 2, k] + high * odd[m + 2, k]
                d += low * even[m + 3, k] + high * odd[m + 3, k]
            out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = a, b, c, d
            m += 4
        while m < rows:
            a = b = np.float32(0)
            for k in range(inner):
                a += low_half(pairs[n, k]) * even[m, k]
                b += high_half(pairs[n, k]) * odd[m, k]
            out[m, n] = a + b
            m += 1


def stream(weight: Any, x: Any, out: Any) -> None:
    """Write x @ weight.T to `out`: callable from numba only.

    weight: [N, K] float32, or [N, K / 2] uint32 of packed bfloat16 pairs; x: [M, K]; out: [M, N].
    """
    raise TypeError("called from compiled code only")


@overload(stream)
def _stream(weight: Any, x: Any, out: Any) -> Any:
    if weight.dtype == types.float32:

        def plain(weight: Any, x: Any, out: Any) -> None:
            _multiply_float32(weight, x, out)

        return plain

    def packed(weight: Any, x: Any, out: Any) -> None:
        _multiply_bfloat16(weight, x[:, ::2].copy(), x[:, 1::2].copy(), out)

    return packed


@njit(nogil=True, cache=True)
def _call_stream(weight: Any, x: Any, out: Any) -> None:
    stream(weight, x, out)


def streamable(weight: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return the array of a weight that `stream` takes."""
    return weight.numpy() if weight.dtype is torch.float32 else weight.view(torch.uint32).numpy()


@njit(parallel=True, nogil=True, cache=True)
def _widen_all(weight: Any, out: Any) -> None:
    for n in prange(weight.shape[0]):
        for k in range(weight.shape[1]):
            out[n, k] = widen(weight[n, k])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: Workspace,
) -> torch.Tensor:
    """Write x @ weight.T + bias to `out` and return it.

    x: [M, K] float32; weight: [N, K] float32 or bfloat16 (K even); bias: [N] float32 or None;
    out: [M, N] float32. Raises ValueError for other shapes or dtypes.
    """
    (rows, inner), outer = x.shape, weight.shape[0]
    check("x", x, (rows, inner), torch.float32)
    check("weight", weight, (outer, inner), *STORAGE)
    check("out", out, (rows, outer), torch.float32)
    if rows > FEW_ROWS:
        torch.mm(x, _widened(weight, workspace).T, out=out)
    else:
        _call_stream(streamable(weight), x.numpy(), out.numpy())
    if bias is not None:
        check("bias", bias, (outer,), torch.float32)
        out += bias
    return out


def _widened(weight: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    if weight.dtype is torch.float32:
        return weight
    wide = workspace.take("linear.weight", tuple(weight.shape))
    _widen_all(view(weight), wide.numpy())
    return wide
