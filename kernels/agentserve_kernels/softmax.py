"""The inner loops of an online softmax (arXiv 1805.02867) on the CPU, as LLVM vector code.

Arguments are pointers to float32, as `tiles.at` gives them. Scores are in units of ln 2, so that a
weight is a power of two: see `query_scale`.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from agentserve_kernels.registers import (
    COLUMNS,
    I64,
    VECTORS,
    WIDTH,
    ZERO,
    largest_lane,
    load_lanes,
    splat,
    store_lanes,
    totals,
)
from agentserve_kernels.scalar import LOG2_E, emit_powers

_UNROLL = 2  # keys whose weights are computed abreast


@njit(nogil=True, cache=True)
def query_scale(dim: int) -> Any:
    """Return what queries of `dim` elements are multiplied with: 1 / sqrt(dim) / ln 2."""
    return LOG2_E / np.sqrt(np.float32(dim))


def _weigh(builder: Any, scores: Any, keys: list[Any], tops: list[Any], added: list[Any]) -> None:
    """Turn the scores of some keys into weights and add them up."""
    rows = [builder.mul(key, I64(COLUMNS)) for key in keys]
    places = [builder.add(row, I64(j * WIDTH)) for row in rows for j in range(VECTORS)]
    less = [
        builder.fsub(load_lanes(builder, scores, place), builder.load(tops[n % VECTORS]))
        for n, place in enumerate(places)
    ]
    for n, weight in enumerate(emit_powers(builder, less)):
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
            factor = emit_powers(builder, [less])[0]
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
            weight = emit_powers(builder, [builder.fsub(load_lanes(builder, scores, k), wide)])[0]
            store_lanes(builder, weight, scores, k)
            builder.store(builder.fadd(builder.load(sums), weight), sums)
        factor = emit_powers(builder, [builder.fsub(before, largest)])[0]
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
