"""Register tiles: the inner loops of matrix products on the CPU, as LLVM vector code.

LLVM vectorises one accumulator well. Twelve at a time, which is what keeps both multipliers of a
core busy, it takes only when they are vectors from the start; so these loops are emitted as such,
each as a function that is called and never inlined: amid the variables of the loops around it
there would not be registers enough for its pointers.

A matrix is a tuple (`at(array, offset)`, strides in elements). It is not the array itself, whose
references numba would count, atomically, at every tile.
"""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from agentserve_kernels.registers import (
    I32,
    I64,
    ROWS,
    VECTORS,
    WIDTH,
    ZERO,
    accumulate,
    load_lanes,
    load_one,
    load_pair,
    load_stored,
    splat,
    store_lanes,
    totals,
)

BYTES = ir.IntType(8).as_pointer()
LINE = 64  # bytes

Emit = Callable[[Any, Any, tuple[int, int]], None]


@intrinsic
def at(typing_context: Any, array: Any, offset: Any) -> Any:
    """Return where element `offset` of a contiguous array, taken as flat, lies in memory."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.intp), generate


@intrinsic
def after(typing_context: Any, pointer: Any, offset: Any) -> Any:
    """Return the pointer to what lies `offset` elements further on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), generate


@intrinsic
def fetch(typing_context: Any, pointer: Any, count: Any) -> Any:
    """Ask for the cache lines of `count` elements that will be read soon; any address will do."""

    def generate(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [BYTES, I32, I32, I32])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        line = I64(LINE * 8 // signature.args[0].dtype.bitwidth)
        with cgutils.for_range_slice(builder, I64(0), args[1], line) as (k, _):
            place = builder.bitcast(builder.gep(args[0], [k]), BYTES)
            builder.call(call, [place, I32(0), I32(3), I32(1)])  # to read, into all caches, data
        return _context.get_dummy_value()

    return types.void(pointer, types.intp), generate


@intrinsic
def widen_run(typing_context: Any, source: Any, count: Any, out: Any) -> Any:
    """Write `count` stored elements to `out` as float32; pointers both, whole registers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0].dtype
        with cgutils.for_range_slice(builder, I64(0), args[1], I64(WIDTH)) as (k, _):
            store_lanes(builder, load_stored(builder, kind, args[0], k), args[2], k)
        return context.get_dummy_value()

    return types.void(source, types.intp, out), generate


@intrinsic(prefer_literal=True)
def dot_tile(  # noqa: PLR0913
    typing_context: Any, weight: Any, x: Any, depth: Any, out: Any, rows: Any, columns: Any
) -> Any:
    """Write out[j, i] = weight[i] . x[j] over `depth` elements, i < `rows`, j < `columns`.

    weight: matrix (pointer, row stride) of float32, or of bfloat16 as uint16; x, out: of float32.
    `rows` and `columns` are constants whose product is at most 12 (24 with AVX-512): all sums stay
    in registers.
    """
    shape = (rows.literal_value, columns.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0][0].dtype
        operands = [*_matrices(context, builder, signature, args), args[2]]
        _call(builder, "dot_tile", _emit_dot, kind, shape, operands)
        return context.get_dummy_value()

    return types.void(weight, x, types.intp, out, rows, columns), generate


def _emit_dot(function: Any, kind: Any, shape: tuple[int, int]) -> None:
    builder = ir.IRBuilder(function.append_basic_block())
    weights, w_step, inputs, x_step, target, step, length = function.args
    tile = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    sums = {at: cgutils.alloca_once_value(builder, ZERO) for at in tile}
    for place in sums.values():
        builder.store(ZERO, place)
    w_rows = _rows(builder, w_step, shape[0])
    x_rows = _rows(builder, x_step, shape[1])
    whole = builder.and_(length, I64(-WIDTH))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(WIDTH)) as (k, _):
        lanes = [load_lanes(builder, inputs, builder.add(row, k)) for row in x_rows]
        for i, row in enumerate(w_rows):
            wide = load_stored(builder, kind, weights, builder.add(row, k))
            for j in range(shape[1]):
                accumulate(builder, sums[i, j], wide, lanes[j])
    o_rows = _rows(builder, step, shape[1])
    places = {(i, j): builder.gep(target, [builder.add(o_rows[j], I64(i))]) for i, j in tile}
    for j in range(shape[1]):
        column = [builder.load(sums[i, j]) for i in range(shape[0])]
        for i, total in enumerate(totals(builder, column)):
            builder.store(total, places[i, j])
    with cgutils.for_range_slice(builder, whole, length, I64(1)) as (k, _):
        for i, j in tile:
            one = load_one(builder, kind, weights, builder.add(w_rows[i], k))
            other = load_one(builder, types.float32, inputs, builder.add(x_rows[j], k))
            accumulate(builder, places[i, j], one, other)
    builder.ret_void()


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

    left: (pointer, row stride, depth stride) of float32; right: (pointer, depth stride, stride from
    COLUMNS columns to the next) of float32, of bfloat16 as uint16, or of pairs of it as uint32:
    WIDTH columns in the lower halves, the next ones in the upper; out: (pointer, row stride) of
    float32. `rows` and `vectors` are constants, as in `dot_tile`.
    """
    shape = (rows.literal_value, vectors.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[1][0].dtype
        operands = [*_matrices(context, builder, signature, args), args[2]]
        operands.append(cgutils.as_bool_bit(builder, args[4]))
        _call(builder, "outer_tile", _emit_outer, kind, shape, operands)
        return context.get_dummy_value()

    return types.void(left, right, types.intp, out, types.boolean, rows, vectors), generate


def _emit_outer(function: Any, kind: Any, shape: tuple[int, int]) -> None:
    builder = ir.IRBuilder(function.append_basic_block())
    lefts, l_step, l_deep, rights, r_step, r_group, target, step, depth, add = function.args
    tile = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    sums = {at: cgutils.alloca_once_value(builder, ZERO) for at in tile}
    l_rows = _rows(builder, l_step, shape[0])
    o_rows = _rows(builder, step, shape[0])
    groups = _rows(builder, r_group, -(-shape[1] // VECTORS))
    places = {(i, j): builder.add(o_rows[i], I64(j * WIDTH)) for i, j in tile}
    with builder.if_else(add) as (then, otherwise):
        with then:
            for at in tile:
                builder.store(load_lanes(builder, target, places[at]), sums[at])
        with otherwise:
            for at in tile:
                builder.store(ZERO, sums[at])
    left = cgutils.alloca_once_value(builder, lefts)
    right = cgutils.alloca_once_value(builder, rights)
    with cgutils.for_range(builder, depth):
        ones: dict[int, Any] = {}
        lanes: dict[int, Any] = {}
        here, there = builder.load(left), builder.load(right)
        # The shorter side stays in registers, the other one passes through a single one.
        for i, j in sorted(tile, key=lambda at: at[shape[0] <= shape[1]]):
            if i not in ones:
                ones[i] = splat(builder, builder.load(builder.gep(here, [l_rows[i]])))
            if j not in lanes and kind == types.uint32:
                place = builder.add(groups[j // VECTORS], I64(j % VECTORS // 2 * WIDTH))
                lanes[j], lanes[j + 1] = load_pair(builder, there, place)
            elif j not in lanes:
                place = builder.add(groups[j // VECTORS], I64(j % VECTORS * WIDTH))
                lanes[j] = load_stored(builder, kind, there, place)
            accumulate(builder, sums[i, j], ones[i], lanes[j])
        builder.store(builder.gep(here, [l_deep]), left)
        builder.store(builder.gep(there, [r_step]), right)
    for at in tile:
        store_lanes(builder, builder.load(sums[at]), target, places[at])
    builder.ret_void()


@njit(nogil=True, cache=True)
def panel_product(rows: int, left: Any, right: Any, depth: int, out: Any, add: Any) -> None:
    """Do what `outer_tile` does for any number of rows and COLUMNS columns."""
    source, down, deep = left
    target, step = out
    tiles = (rows + ROWS - 1) // ROWS
    for tile in range(tiles):
        row, end = rows * tile // tiles, rows * (tile + 1) // tiles
        some = (after(source, row * down), down, deep)
        there = (after(target, row * step), step)
        if end - row == ROWS:
            outer_tile(some, right, depth, there, add, ROWS, VECTORS)
        elif end - row == 5:
            outer_tile(some, right, depth, there, add, 5, VECTORS)
        elif end - row == 4:
            outer_tile(some, right, depth, there, add, 4, VECTORS)
        elif end - row == 3:
            outer_tile(some, right, depth, there, add, 3, VECTORS)
        elif end - row == 2:
            outer_tile(some, right, depth, there, add, 2, VECTORS)
        else:
            outer_tile(some, right, depth, there, add, 1, VECTORS)


def _matrices(context: Any, builder: Any, signature: Any, args: Any) -> Iterator[Any]:
    """Yield the pointers and the strides, as int64, of arguments 0, 1 and 3."""
    for number in (0, 1, 3):
        kinds = signature.args[number].types
        yield builder.extract_value(args[number], 0)
        for part, kind in enumerate(kinds[1:], 1):
            stride = builder.extract_value(args[number], part)
            yield context.cast(builder, stride, kind, types.intp)


def _call(
    builder: Any, name: str, emit: Emit, kind: Any, shape: tuple[int, int], operands: list[Any]
) -> None:
    """Call the tile of that kind and shape; emit it where this module has none yet."""
    signature = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    name = f"agentserve_{name}_{kind}_{shape[0]}_{shape[1]}"
    tile = cgutils.get_or_insert_function(builder.module, signature, name)
    if tile.is_declaration:
        tile.linkage = "linkonce_odr"
        tile.attributes.add("noinline")
        emit(tile, kind, shape)
    builder.call(tile, operands)


def _rows(builder: Any, stride: Any, count: int) -> list[Any]:
    return [builder.mul(stride, I64(i)) for i in range(count)]
