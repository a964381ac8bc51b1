"""Scalar building blocks that numba inlines into the CPU kernels.

bfloat16 tensors travel as uint16: numba has no such type, and their bits are the upper half of a
float32's. `widen` reads either storage type, `narrow` writes either, so a kernel is written once.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_F32 = ir.FloatType()
# Sums may be reordered, but a NaN must stay one: the finite check is what finds a broken row.
FAST = {"reassoc", "contract", "arcp", "nsz"}
_LOG2_E = np.float32(1.4426950408889634)


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """Return a stored float32 or bfloat16 (uint16) as float32; exact."""

    def generate(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        shifted = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(shifted, _F32)

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, like: Any, value: Any) -> Any:
    """Return a float32 as the type of `like`: itself, or bfloat16 bits rounded half to even."""

    def generate(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[1]
        bits = builder.bitcast(args[1], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        half = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        rounded = builder.lshr(half, ir.Constant(_I32, 16))
        # Rounding a NaN could carry into an infinity; keep it a quiet NaN.
        quiet = builder.or_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 0x0040))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        return builder.trunc(builder.select(is_nan, quiet, rounded), ir.IntType(16))

    return like(like, types.float32), generate


@intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """Return 2.0 ** exponent for an int32 in [-126, 127]."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], ir.Constant(_I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(_I32, 23)), _F32)

    return types.float32(types.int32), generate


@njit(inline="always")
def exp32(x: Any) -> Any:
    """Return e**x in float32, relative error below 3e-7, zero below -87, NaN for NaN.

    A polynomial instead of libm's call, because LLVM can vectorise it: 2**n times the Taylor
    series of 2**f with f in [-0.5, 0.5].
    """
    clamped = min(max(x, np.float32(-87.0)), np.float32(88.0))
    scaled = clamped * _LOG2_E
    whole = np.int32(np.floor(scaled + np.float32(0.5)))
    # Cody-Waite: ln 2 in two parts, so that the remainder keeps its low bits.
    rest = clamped - np.float32(whole) * np.float32(0.693359375)
    rest = rest - np.float32(whole) * np.float32(-2.12194440e-4)
    series = np.float32(1.0 / 5040.0)
    series = series * rest + np.float32(1.0 / 720.0)
    series = series * rest + np.float32(1.0 / 120.0)
    series = series * rest + np.float32(1.0 / 24.0)
    series = series * rest + np.float32(1.0 / 6.0)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    series = series * rest + np.float32(1.0)
    value = series * _power_of_two(whole)
    return value if x >= np.float32(-87.0) else (np.float32(0.0) if x < np.float32(-87.0) else x)


@njit(fastmath=True, nogil=True, cache=True)
def largest(row: Any) -> Any:
    """Return the largest number of a row, -1e30 at least.

    Only a maximum that may ignore NaN is vectorised; `exp32` finds the NaN again.
    """
    top = np.float32(-1e30)
    for i in range(row.size):
        top = max(top, row[i])
    return top
