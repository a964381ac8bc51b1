"""Scalar building blocks that numba inlines into the CPU kernels.

bfloat16 tensors travel as uint16: numba has no such type, and their bits are the upper half of a
float32's. `widen` reads either storage type, `narrow` writes either, so a kernel is written once.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_F32 = ir.FloatType()
# Sums may be reordered, but a NaN must stay one: the finite check is what finds a broken row.
FAST = {"reassoc", "contract", "arcp", "nsz"}


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


def emit_exp(builder: Any, x: Any) -> Any:
    """Emit e**x for a float32 or a vector of them: see `exp32`.

    2**n times e**r, r within half of ln 2, by a polynomial 1 + r + ... of degree 5 that was fitted
    to the least relative error (2e-7 in float32).
    """
    count = x.type.count if isinstance(x.type, ir.VectorType) else 0
    words = ir.VectorType(_I32, count) if count else _I32
    suffix = f"v{count}f32" if count else "f32"

    def constant(value: float, kind: Any = x.type) -> Any:
        return ir.Constant(kind, [value] * count if count else value)

    def call(name: str, *operands: Any) -> Any:
        kind = ir.FunctionType(x.type, [x.type] * len(operands))
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.{suffix}")
        return builder.call(function, operands)

    # Comparisons that are false for NaN, which goes through to the end.
    high = builder.fcmp_ordered(">", x, constant(88.0))
    capped = builder.select(high, constant(88.0), x)
    whole = call("rint", builder.fmul(capped, constant(1.4426950408889634)))
    # Cody-Waite: ln 2 in two parts, so that the remainder keeps its low bits.
    rest = call("fmuladd", whole, constant(-0.693359375), capped)
    rest = call("fmuladd", whole, constant(2.12194440e-4), rest)
    series = constant(0.00831974298)
    for coefficient in (0.0418923944, 0.166670367, 0.499992073, 1.0, 1.0):
        series = call("fmuladd", series, rest, constant(coefficient))
    shift = builder.shl(builder.fptosi(whole, words), constant(23, words))
    value = builder.bitcast(builder.add(builder.bitcast(series, words), shift), x.type)
    return builder.select(builder.fcmp_ordered("<", x, constant(-87.0)), constant(0.0), value)


@intrinsic
def exp32(typing_context: Any, x: Any) -> Any:
    """Return e**x in float32, relative error below 3e-7, zero below -87, NaN for NaN.

    Not libm's call, because LLVM can vectorise this.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return emit_exp(builder, args[0])

    return types.float32(types.float32), generate
