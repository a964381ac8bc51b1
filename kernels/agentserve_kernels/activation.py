"""SwiGLU's element-wise half (arXiv 2002.05202): silu(gate) * up."""

from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from agentserve_kernels.registers import I64, LANES, WIDTH, load_lanes, store_lanes
from agentserve_kernels.scalar import LOG2_E, emit_powers, power
from agentserve_kernels.tensors import PARALLEL_ROWS, check
from agentserve_kernels.tiles import at

_ABREAST = 4  # registers; the chain of one is all latency
_MOST = np.float32(126)  # of an exponent: silu is zero long before


@intrinsic
def _silu_run(typing_context: Any, gate: Any, up: Any, count: Any, out: Any) -> Any:
    """Write silu(gate) * up of `count` elements, a multiple of WIDTH; pointers to float32."""

    def emit(builder: Any, args: Any, places: list[Any]) -> None:
        def constant(value: Any) -> Any:
            return LANES([float(value)] * WIDTH)

        gates = [load_lanes(builder, args[0], place) for place in places]
        exponents = [builder.fmul(gate, constant(-LOG2_E)) for gate in gates]
        too_large = [builder.fcmp_ordered(">", x, constant(_MOST)) for x in exponents]
        pairs = zip(too_large, exponents, strict=True)
        capped = [builder.select(large, constant(_MOST), x) for large, x in pairs]
        for gate, less, place in zip(gates, emit_powers(builder, capped), places, strict=True):
            share = builder.fdiv(gate, builder.fadd(less, constant(1)))
            product = builder.fmul(share, load_lanes(builder, args[1], place))
            store_lanes(builder, product, args[3], place)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.and_(args[2], I64(-_ABREAST * WIDTH))
        for start, end, some in ((I64(0), whole, _ABREAST), (whole, args[2], 1)):
            with cgutils.for_range_slice(builder, start, end, I64(some * WIDTH)) as (k, _):
                emit(builder, args, [builder.add(k, I64(i * WIDTH)) for i in range(some)])
        return context.get_dummy_value()

    return types.void(gate, up, types.intp, out), generate


def _rows(gate_up: Any, out: Any) -> None:
    size = out.shape[1]
    whole = size // WIDTH * WIDTH
    for row in prange(out.shape[0]):
        gates = at(gate_up, row * 2 * size)
        _silu_run(gates, at(gate_up, (row * 2 + 1) * size), whole, at(out, row * size))
        for i in range(whole, size):
            gate = gate_up[row, i]
            less = power(min(-gate * LOG2_E, _MOST))
            out[row, i] = gate / (np.float32(1) + less) * gate_up[row, size + i]


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
