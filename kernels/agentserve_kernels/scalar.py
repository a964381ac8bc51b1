"""Scalar building blocks that numba inlines into the CPU kernels.

bfloat16 tensors travel as uint16: numba has no such type, and their bits are the upper half of a
float32's. `widen` reads either storage type, `narrow` writes either, so a kernel is written once.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_F32 = ir.FloatType()
# Sums may be reordered, but a NaN must stay one: the finite check is what finds a broken row.
FAST = {"reassoc", "contract", "arcp", "nsz"}

LOG2_E = np.float32(1 / math.log(2))
# 2**r = 1 + r * (...) for r within a half, fitted to the least relative error (1.6e-7 in float32).
_POWERS = (0.0013264727, 0.0096715130, 0.0555073358, 0.2402224243, 0.6931470037, 1.0)


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


def emit_powers(builder: Any, xs: list[Any]) -> list[Any]:
    """Emit 2**x for each x <= 126, float32s or vectors of them; relative error below 3e-7.

    From -127 on down it is exactly zero; NaN for NaN, because a broken row must be found. Several
    take turns, because one alone is a chain of latencies.
    """
    kind = xs[0].type
    count = kind.count if isinstance(kind, ir.VectorType) else 0
    words = ir.VectorType(_I32, count) if count else _I32

    def function(name: str, arguments: int) -> Any:
        full = f"llvm.{name}.v{count}f32" if count else f"llvm.{name}.f32"
        signature = ir.FunctionType(kind, [kind] * arguments)
        return cgutils.get_or_insert_function(builder.module, signature, full)

    def constant(value: float, kind: Any = kind) -> Any:
        return ir.Constant(kind, [value] * count if count else value)

    rint, fused = function("rint", 1), function("fmuladd", 3)
    lowest = constant(-127.0)
    # One instruction each, because of the order of its operands.
    xs = [builder.select(builder.fcmp_ordered(">", lowest, x), lowest, x) for x in xs]
    wholes = [builder.call(rint, [x]) for x in xs]
    rests = [builder.fsub(x, whole) for x, whole in zip(xs, wholes, strict=True)]
    series = [constant(_POWERS[0])] * len(xs)
    for coefficient in map(constant, _POWERS[1:]):
        pairs = zip(series, rests, strict=True)
        series = [builder.call(fused, [sum, rest, coefficient]) for sum, rest in pairs]
    shift = constant(23, words)
    exponents = [builder.shl(builder.fptosi(whole, words), shift) for whole in wholes]
    bits = [builder.bitcast(x, words) for x in series]
    sums = [builder.add(*pair) for pair in zip(bits, exponents, strict=True)]
    return [builder.bitcast(sum, kind) for sum in sums]


@intrinsic
def power(typing_context: Any, x: Any) -> Any:
    """Return 2**x in float32 for x <= 126: see `emit_powers`."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return emit_powers(builder, args)[0]

    return types.float32(types.float32), generate
