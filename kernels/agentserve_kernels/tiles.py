"""Register tiles: the two inner loops of every matrix product on the CPU, as LLVM vector code.

LLVM vectorises one accumulator well. Twelve at a time, which is what keeps both multipliers of a
core busy, it takes only when they are vectors from the start; so these loops are emitted as such.
A matrix is a tuple (`at(array, offset)`, row stride in elements). It is not the array itself, whose
references numba would count, atomically, at every tile.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WIDE = binding.get_host_cpu_features().get("avx512f", False)
WIDTH = 16 if _WIDE else 8  # float32 in a register
ROWS = 6  # of the largest outer tile: 12 sums of 16 registers, or with AVX-512 24 of 32
VECTORS = 4 if _WIDE else 2
COLUMNS = VECTORS * WIDTH

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = ir.VectorType(_F32, WIDTH)
_WORDS = ir.VectorType(_I32, WIDTH)
_HALVES = ir.VectorType(_I16, WIDTH)
_ZERO = ir.Constant(_LANES, [0.0] * WIDTH)
# Sums may be reordered, but a NaN must stay one: the finite check is what finds a broken row.
_FLAGS = ("reassoc", "contract", "arcp", "nsz")


@intrinsic
def at(typing_context: Any, array: Any, offset: Any) -> Any:
    """Return where element `offset` of a contiguous array, taken as flat, lies in memory."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.intp), generate


@intrinsic(prefer_literal=True)
def dot_tile(  # noqa: PLR0913
    typing_context: Any, weight: Any, x: Any, depth: Any, out: Any, rows: Any, columns: Any
) -> Any:
    """Write out[j, i] = weight[i] . x[j] over `depth` elements, i < `rows`, j < `columns`.

    weight: matrix of float32, or of bfloat16 as uint16; x, out: of float32. `rows` and `columns`
    are constants whose product is at most 12 (24 with AVX-512): all sums stay in registers.
    """
    shape = (rows.literal_value, columns.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0][0].dtype
        operands = (_matrix(context, builder, signature, args, n) for n in (0, 1, 3))
        (weights, w_step), (inputs, x_step), (target, step) = operands
        length = args[2]
        tile = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
        sums = {at: cgutils.alloca_once_value(builder, _ZERO) for at in tile}
        for place in sums.values():
            builder.store(_ZERO, place)
        w_rows = _rows(builder, w_step, shape[0])
        x_rows = _rows(builder, x_step, shape[1])
        whole = builder.and_(length, _I64(-WIDTH))
        with cgutils.for_range_slice(builder, _I64(0), whole, _I64(WIDTH)) as (k, _):
            lanes = [_load(builder, types.float32, inputs, builder.add(row, k)) for row in x_rows]
            for i, row in enumerate(w_rows):
                wide = _load(builder, kind, weights, builder.add(row, k))
                for j in range(shape[1]):
                    _accumulate(builder, sums[i, j], wide, lanes[j])
        totals = {}
        for at in tile:
            totals[at] = cgutils.alloca_once(builder, _F32)
            builder.store(_total(builder, builder.load(sums[at])), totals[at])
        with cgutils.for_range_slice(builder, whole, length, _I64(1)) as (k, _):
            for i, j in tile:
                one = _load_one(builder, kind, weights, builder.add(w_rows[i], k))
                other = _load_one(builder, types.float32, inputs, builder.add(x_rows[j], k))
                _accumulate(builder, totals[i, j], one, other)
        for i, j in tile:
            index = builder.add(builder.mul(step, _I64(j)), _I64(i))
            builder.store(builder.load(totals[i, j]), builder.gep(target, [index]))
        return context.get_dummy_value()

    return types.void(weight, x, types.intp, out, rows, columns), generate


@intrinsic(prefer_literal=True)
def outer_tile(  # noqa: PLR0913
    typing_context: Any,
    left: Any,
    right: Any,
    depth: Any,
    out: Any,
    add: Any,
    rows: Any,
    vectors: Any,
) -> Any:
    """Write, or add where `add` is true, left @ right: `rows` by `vectors` * WIDTH elements.

    left: matrix [rows, depth] of float32; right: [depth, columns] of float32, or of bfloat16 as
    uint16; out: of float32. `rows` and `vectors` are constants, as in `dot_tile`.
    """
    shape = (rows.literal_value, vectors.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[1][0].dtype
        operands = (_matrix(context, builder, signature, args, n) for n in (0, 1, 3))
        (lefts, l_step), (rights, r_step), (target, step) = operands
        tile = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
        sums = {at: cgutils.alloca_once_value(builder, _ZERO) for at in tile}
        l_rows = [builder.gep(lefts, [row]) for row in _rows(builder, l_step, shape[0])]
        o_rows = _rows(builder, step, shape[0])
        places = {(i, j): builder.add(o_rows[i], _I64(j * WIDTH)) for i, j in tile}
        with builder.if_else(cgutils.as_bool_bit(builder, args[4])) as (then, otherwise):
            with then:
                for at in tile:
                    before = _load(builder, types.float32, target, places[at])
                    builder.store(before, sums[at])
            with otherwise:
                for at in tile:
                    builder.store(_ZERO, sums[at])
        with cgutils.for_range(builder, args[2]) as loop:
            row = builder.mul(loop.index, r_step)
            ones, lanes = {}, {}
            # The shorter side stays in registers, the other one passes through a single one.
            for i, j in sorted(tile, key=lambda at: at[shape[0] <= shape[1]]):
                if i not in ones:
                    scalar = builder.load(builder.gep(l_rows[i], [loop.index]))
                    ones[i] = _splat(builder, scalar)
                if j not in lanes:
                    place = builder.add(row, _I64(j * WIDTH))
                    lanes[j] = _load(builder, kind, rights, place)
                _accumulate(builder, sums[i, j], ones[i], lanes[j])
        for at in tile:
            pointer = builder.bitcast(builder.gep(target, [places[at]]), _LANES.as_pointer())
            builder.store(builder.load(sums[at]), pointer, align=4)
        return context.get_dummy_value()

    return types.void(left, right, types.intp, out, types.boolean, rows, vectors), generate


def _matrix(context: Any, builder: Any, signature: Any, args: Any, number: int) -> tuple[Any, Any]:
    """Return the pointer and the row stride, as int64, of an argument."""
    pointer, stride = (builder.extract_value(args[number], part) for part in range(2))
    return pointer, context.cast(builder, stride, signature.args[number][1], types.intp)


def _rows(builder: Any, stride: Any, count: int) -> list[Any]:
    return [builder.mul(stride, _I64(i)) for i in range(count)]


def _load(builder: Any, kind: Any, base: Any, index: Any) -> Any:
    """Read WIDTH stored elements, widened to float32; any alignment."""
    pointer = builder.gep(base, [index])
    if kind == types.float32:
        return builder.load(builder.bitcast(pointer, _LANES.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
    shifted = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * WIDTH))
    return builder.bitcast(shifted, _LANES)


def _load_one(builder: Any, kind: Any, base: Any, index: Any) -> Any:
    value = builder.load(builder.gep(base, [index]))
    if kind == types.float32:
        return value
    return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)


def _splat(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(_LANES, ir.Undefined)
    one = builder.insert_element(nothing, value, _I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * WIDTH))


def _accumulate(builder: Any, place: Any, a: Any, b: Any) -> None:
    product = builder.fmul(a, b, flags=_FLAGS)
    builder.store(builder.fadd(product, builder.load(place), flags=_FLAGS), place)


def _total(builder: Any, lanes: Any) -> Any:
    """Sum the lanes, halving the vector each time."""
    count = WIDTH
    while count > 1:
        count //= 2
        mask = ir.VectorType(_I32, count)
        nothing = ir.Constant(lanes.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(lanes, nothing, ir.Constant(mask, list(range(first, end))))
            for first, end in ((0, count), (count, 2 * count))
        )
        lanes = builder.fadd(low, high, flags=_FLAGS)
    return builder.extract_element(lanes, _I32(0))
