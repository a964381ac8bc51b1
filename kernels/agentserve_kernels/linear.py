"""Matrix product of float32 inputs with stored float32 or bfloat16 weights, for any number of rows.

The weights are kept as panels of COLUMNS output features, in the order in which a register tile
reads them, and are widened in registers: one token is bound by the weight bytes, many by the
multipliers. Every output is summed in the same order whatever the number of rows, so that a row's
result does not depend on its neighbours.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from agentserve_kernels.tensors import STORAGE, check, view
from agentserve_kernels.tiles import COLUMNS, ROWS, VECTORS, at, outer_tile

DEPTH = 1024  # of a panel at a time, so that it stays in the core's own cache


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] as panels [N / COLUMNS, K, COLUMNS], the last one padded with zeros."""

    panels: Any
    outer: int


def pack(weight: torch.Tensor) -> Packed:
    """Return the panels of a weight, a copy. weight: [N, K] float32 or bfloat16."""
    outer, inner = weight.shape
    check("weight", weight, (outer, inner), *STORAGE)
    count = -(-outer // COLUMNS)
    padded = torch.zeros((count * COLUMNS, inner), dtype=weight.dtype)
    padded[:outer] = weight
    panels = padded.view(count, COLUMNS, inner).transpose(1, 2).contiguous()
    return Packed(view(panels), outer)


@njit(nogil=True, cache=True)
def _tile(rows: int, x: Any, panel: Any, depth: int, out: Any, add: Any) -> None:
    if rows == ROWS:
        outer_tile(x, panel, depth, out, add, ROWS, VECTORS)
    elif rows == 5:
        outer_tile(x, panel, depth, out, add, 5, VECTORS)
    elif rows == 4:
        outer_tile(x, panel, depth, out, add, 4, VECTORS)
    elif rows == 3:
        outer_tile(x, panel, depth, out, add, 3, VECTORS)
    elif rows == 2:
        outer_tile(x, panel, depth, out, add, 2, VECTORS)
    else:
        outer_tile(x, panel, depth, out, add, 1, VECTORS)


@njit(nogil=True, cache=True)
def _multiply_panel(panels: Any, number: int, x: Any, out: Any, first: int) -> None:
    """Write the product with one panel to columns first.. of `out`."""
    rows, inner = x.shape
    stride = out.shape[1]
    tiles = (rows + ROWS - 1) // ROWS
    for k in range(0, inner, DEPTH):
        depth = min(DEPTH, inner - k)
        panel = (at(panels, (number * inner + k) * COLUMNS), COLUMNS)
        for tile in range(tiles):
            row, end = rows * tile // tiles, rows * (tile + 1) // tiles
            left = (at(x, row * inner + k), inner)
            target = (at(out, row * stride + first), stride)
            _tile(end - row, left, panel, depth, target, k > 0)


@njit(parallel=True, nogil=True, cache=True)
def multiply(panels: Any, bias: Any, x: Any, out: Any) -> None:
    """Write x @ weight.T + bias to `out`, all arrays; an absent bias is empty."""
    rows, outer = out.shape
    for number in prange(panels.shape[0]):
        first = number * COLUMNS
        if first + COLUMNS <= outer:
            _multiply_panel(panels, number, x, out, first)
        else:
            edge = np.empty((rows, COLUMNS), np.float32)
            _multiply_panel(panels, number, x, edge, 0)
            out[:, first:] = edge[:, : outer - first]
        if bias.size:
            for row in range(rows):
                for i in range(first, min(first + COLUMNS, outer)):
                    out[row, i] += bias[i]


def bias_array(bias: torch.Tensor | None) -> Any:
    """Return what `multiply` takes."""
    return np.empty(0, np.float32) if bias is None else bias.numpy()


def linear(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Write x @ weight.T + bias to `out` and return it.

    x: [M, K] float32; bias: [N] float32 or None; out: [M, N] float32. Raises ValueError for other
    shapes or dtypes.
    """
    rows = x.shape[0]
    check("x", x, (rows, weight.panels.shape[1]), torch.float32)
    check("out", out, (rows, weight.outer), torch.float32)
    if bias is not None:
        check("bias", bias, (weight.outer,), torch.float32)
    multiply(weight.panels, bias_array(bias), x.numpy(), out.numpy())
    return out
