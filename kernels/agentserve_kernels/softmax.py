"""The inner loops of an online softmax (arXiv 1805.02867) on the CPU, as LLVM vector code.

Arguments are pointers to float32, as `tiles.at` gives them. Scores are in units of ln 2, so that a
weight is a power of two: see `query_scale`.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from agentserve_kernels.registers import (
    COLUMNS,
    I32,
    I64,
    VECTORS,
    WIDTH,
    WORDS,
    ZERO,
    largest_lane,
    load_lanes,
    splat,
    store_lanes,
    totals,
)

_LOG2_E = np.float32(1 / math.log(2))
# 2**r = 1 + r * (...) for r within a half, fitted to the least relative error (1.6e-7 in float32).
_POWERS = (0.0013264727, 0.0096715130, 0.0555073358, 0.2402224243, 0.6931470037, 1.0)
_UNROLL = 2  # keys whose weights are computed abreast


@njit(nogil=True, cache=True)
def query_scale(dim: int) -> Any:
    """Return what queries of `dim` elements are multiplied with: 1 / sqrt(dim) / ln 2."""
    return _LOG2_E / np.sqrt(np.float32(dim))


def _emit_powers(builder: Any, xs: list[Any]) -> list[Any]:
    """Emit 2**x for each x <= 0, float32s or vectors of them; relative error below 3e-7.

    From -127 on down it is exactly zero; NaN for NaN, because a broken row must be found. Several
    take turns, because one alone is a chain of latencies.
    """
    kind = xs[0].type
    vector = isinstance(kind, ir.VectorType)
    words = WORDS if vector else I32

    def function(name: str, arguments: int) -> Any:
        full = f"llvm.{name}.v{WIDTH}f32" if vector else f"llvm.{name}.f32"
        signature = ir.FunctionType(kind, [kind] * arguments)
        return cgutils.get_or_insert_function(builder.module, signature, full)

    def constant(value: float, kind: Any = kind) -> Any:
        return ir.Constant(kind, [value] * WIDTH if vector else value)

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
    pairs = zip(series, exponents, strict=True)
    return [
        builder.bitcast(builder.add(builder.bitcast(x, words), exponent), kind)
        for x, exponent in pairs
    ]


@intrinsic
def power(typing_context: Any, x: Any) -> Any:
    """Return 2**x in float32 for x <= 0: how much less the weight of a score lower by -x is."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _emit_powers(builder, args)[0]

    return types.float32(types.float32), generate


def _weigh(builder: Any, scores: Any, keys: list[Any], tops: list[Any], added: list[Any]) -> None:
    """Turn the scores of some keys into weights and add them up."""
    rows = [builder.mul(key, I64(COLUMNS)) for key in keys]
    places = [builder.add(row, I64(j * WIDTH)) for row in rows for j in range(VECTORS)]
    less = [
        builder.fsub(load_lanes(builder, scores, place), builder.load(tops[n % VECTORS]))
        for n, place in enumerate(places)
    ]
    for n, weight in enumerate(_emit_powers(builder, less)):
        store_lanes(builder, weight, scores, places[n])
        total = added[n % VECTORS]
        builder.store(builder.fadd(builder.load(total), weight), total)


@intrinsic
def softmax_tile(
    typing_context: Any, scores: Any, keys: Any, maxima: Any, sums: Any, shrink: Any
) -> Any:
    """Turn scores [keys, COLUMNS] into weights under new maxima, and bring the sums under these.

    All are pointers to float32; the others to COLUMNS each. A column is a softmax of its own that
    goes on from earlier keys (arXiv 1805.02867); shrink is set to what its earlier weights must be
    multiplied with.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, keys, maxima, sums, shrink = args
        lanes = [I64(j * WIDTH) for j in range(VECTORS)]
        tops = [
            cgutils.alloca_once_value(builder, load_lanes(builder, maxima, lane)) for lane in lanes
        ]
        added = [cgutils.alloca_once_value(builder, ZERO) for _ in lanes]
        for lane, top, total in zip(lanes, tops, added, strict=True):
            builder.store(load_lanes(builder, maxima, lane), top)
            builder.store(ZERO, total)
        with cgutils.for_range(builder, keys) as loop:
            row = builder.mul(loop.index, I64(COLUMNS))
            for lane, top in zip(lanes, tops, strict=True):
                score = load_lanes(builder, scores, builder.add(row, lane))
                before = builder.load(top)
                larger = builder.fcmp_ordered(">", score, before)
                builder.store(builder.select(larger, score, before), top)
        whole = builder.and_(keys, I64(-_UNROLL))
        for start, end, some in ((I64(0), whole, _UNROLL), (whole, keys, 1)):
            with cgutils.for_range_slice(builder, start, end, I64(some)) as (first, _):
                abreast = [builder.add(first, I64(i)) for i in range(some)]
                _weigh(builder, scores, abreast, tops, added)
        for lane, top, total in zip(lanes, tops, added, strict=True):
            less = builder.fsub(load_lanes(builder, maxima, lane), builder.load(top))
            factor = _emit_powers(builder, [less])[0]
            store_lanes(builder, factor, shrink, lane)
            store_lanes(builder, builder.load(top), maxima, lane)
            kept = builder.fmul(load_lanes(builder, sums, lane), factor)
            store_lanes(builder, builder.fadd(kept, builder.load(total)), sums, lane)
        return context.get_dummy_value()

    return types.void(scores, types.intp, maxima, sums, shrink), generate


@intrinsic
def softmax_row(
    typing_context: Any, scores: Any, keys: Any, top: Any, total: Any, shrink: Any
) -> Any:
    """Do what `softmax_tile` does for one row of scores [keys] and one number each.

    keys: rounded up to a multiple of WIDTH; what is beyond the row's own must be -1e30.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, keys, top, total, shrink = args
        before = builder.load(top)
        most = cgutils.alloca_once_value(builder, ZERO)
        sums = cgutils.alloca_once_value(builder, ZERO)
        builder.store(splat(builder, before), most)
        builder.store(ZERO, sums)
        with cgutils.for_range_slice(builder, I64(0), keys, I64(WIDTH)) as (k, _):
            score, so_far = load_lanes(builder, scores, k), builder.load(most)
            larger = builder.fcmp_ordered(">", score, so_far)
            builder.store(builder.select(larger, score, so_far), most)
        largest = largest_lane(builder, builder.load(most))
        wide = splat(builder, largest)
        with cgutils.for_range_slice(builder, I64(0), keys, I64(WIDTH)) as (k, _):
            weight = _emit_powers(builder, [builder.fsub(load_lanes(builder, scores, k), wide)])[0]
            store_lanes(builder, weight, scores, k)
            builder.store(builder.fadd(builder.load(sums), weight), sums)
        factor = _emit_powers(builder, [builder.fsub(before, largest)])[0]
        added = totals(builder, [builder.load(sums)])[0]
        builder.store(builder.fadd(builder.fmul(builder.load(total), factor), added), total)
        builder.store(largest, top)
        builder.store(factor, shrink)
        return context.get_dummy_value()

    return types.void(scores, types.intp, top, total, shrink), generate


@intrinsic
def shrink_columns(typing_context: Any, rows: Any, values: Any, shrink: Any) -> Any:
    """Multiply `rows` rows of values [rows, COLUMNS] by shrink [COLUMNS], both pointers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, values, shrink = args
        lanes = [I64(j * WIDTH) for j in range(VECTORS)]
        factors = [load_lanes(builder, shrink, lane) for lane in lanes]
        with cgutils.for_range(builder, rows) as loop:
            row = builder.mul(loop.index, I64(COLUMNS))
            for lane, factor in zip(lanes, factors, strict=True):
                place = builder.add(row, lane)
                value = builder.fmul(load_lanes(builder, values, place), factor)
                store_lanes(builder, value, values, place)
        return context.get_dummy_value()

    return types.void(types.intp, values, shrink), generate
