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
from numba import get_num_threads, njit, prange

from agentserve_kernels.claims import claim, share
from agentserve_kernels.registers import COLUMNS, VECTORS, WIDTH
from agentserve_kernels.tensors import STORAGE, check, view
from agentserve_kernels.tiles import at, outer_tile, panel_product

FEW = 4  # panels that one row is multiplied with abreast
TWO, FOUR = 2 * VECTORS, 4 * VECTORS
DEPTH = 1024  # of a panel at a time, so that it stays in the core's own cache


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] as panels [N / COLUMNS, K, COLUMNS], the last one padded with zeros.

    Of bfloat16, [N / COLUMNS, K, COLUMNS / 2] pairs as `outer_tile` takes them.
    """

    panels: Any
    outer: int


def panel_kind(weight: torch.Tensor) -> tuple[tuple[int, int, int], type[np.generic]]:
    """Return shape and dtype of a weight's panels."""
    count, inner = -(-weight.shape[0] // COLUMNS), weight.shape[1]
    if weight.dtype is torch.bfloat16:
        return (count, inner, COLUMNS // 2), np.uint32
    return (count, inner, COLUMNS), np.float32


def fill_panels(weight: torch.Tensor, panels: Any) -> None:
    """Copy a weight [N, K] float32 or bfloat16 to its panels, an array."""
    outer, inner = weight.shape
    check("weight", weight, (outer, inner), *STORAGE)
    stored = view(weight)
    padded = np.zeros((panels.shape[0] * COLUMNS, inner), stored.dtype)
    padded[:outer] = stored
    natural = padded.reshape(-1, COLUMNS, inner).transpose(0, 2, 1)
    if panels.dtype == np.uint32:
        halves = panels.view(np.uint16).reshape(*panels.shape[:2], -1, WIDTH, 2)
        halves[:] = natural.reshape(*panels.shape[:2], -1, 2, WIDTH).swapaxes(-1, -2)
    else:
        panels[:] = natural


def pack(weight: torch.Tensor) -> Packed:
    """Return the panels of a weight, a copy. weight: [N, K] float32 or bfloat16."""
    check("weight", weight, tuple(weight.shape), *STORAGE)
    panels = np.empty(*panel_kind(weight))
    fill_panels(weight, panels)
    return Packed(panels, weight.shape[0])


@njit(nogil=True, cache=True)
def _abreast(panels: Any, number: int, left: int, x: Any, out: Any) -> int:
    """Multiply one or two rows with several whole panels at once; return how many.

    One panel gives a row two sums, too few to hide the latency of an addition.
    """
    rows, inner = x.shape
    width = panels.shape[2]
    apart = inner * width
    target = (at(out, number * COLUMNS), out.shape[1])
    inputs, panel = (at(x, 0), inner, 1), (at(panels, number * apart), width, apart)
    if rows == 1 and left >= 4:
        outer_tile(inputs, panel, inner, target, False, 1, FOUR)
        return 4
    if rows == 1 and left >= 2:
        outer_tile(inputs, panel, inner, target, False, 1, TWO)
        return 2
    if rows == 2 and left >= 2:
        outer_tile(inputs, panel, inner, target, False, 2, TWO)
        return 2
    return 0


@njit(nogil=True, cache=True)
def _multiply_panel(panels: Any, number: int, x: Any, out: Any, first: int) -> None:
    """Write the product with one panel to columns first.. of `out`."""
    rows, inner = x.shape
    width = panels.shape[2]
    for k in range(0, inner, DEPTH):
        panel = (at(panels, (number * inner + k) * width), width, 0)
        left, target = (at(x, k), inner, 1), (at(out, first), out.shape[1])
        panel_product(rows, left, panel, min(DEPTH, inner - k), target, k > 0)


@njit(nogil=True, cache=True)
def _multiply_panels(panels: Any, bias: Any, x: Any, out: Any, number: int, end: int) -> None:
    rows, outer = out.shape
    columns = (number * COLUMNS, min(end * COLUMNS, outer))
    whole = min(end, outer // COLUMNS)
    while number < whole:
        done = _abreast(panels, number, whole - number, x, out)
        if not done:
            _multiply_panel(panels, number, x, out, number * COLUMNS)
            done = 1
        number += done
    if number < end:  # the last one is partly padding
        edge = np.empty((rows, COLUMNS), np.float32)
        _multiply_panel(panels, number, x, edge, 0)
        for row in range(rows):
            for i in range(number * COLUMNS, outer):
                out[row, i] = edge[row, i - number * COLUMNS]
    if bias.size:
        for row in range(rows):
            for i in range(columns[0], columns[1]):
                out[row, i] += bias[i]


@njit(nogil=True, cache=True)
def _multiply_claimed(panels: Any, bias: Any, x: Any, out: Any, crew: Any) -> None:
    """Do runs of panels until none is left. crew: (claims, threads)."""
    claims, threads = crew
    least = FEW if x.shape[0] <= 2 else 1
    while True:
        first, end = share(claim(claims), panels.shape[0], least, threads)
        if first == end:
            return
        _multiply_panels(panels, bias, x, out, first, end)


@njit(parallel=True, nogil=True, cache=True)
def multiply(panels: Any, bias: Any, x: Any, out: Any, threads: int) -> None:
    """Write x @ weight.T + bias to `out`, all arrays; an absent bias is empty."""
    claims = np.zeros(1, np.int64)
    for _ in prange(threads):
        _multiply_claimed(panels, bias, x, out, (claims, threads))


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
    added = np.empty(0, np.float32) if bias is None else bias.numpy()
    multiply(weight.panels, added, x.numpy(), out.numpy(), get_num_threads())
    return out
