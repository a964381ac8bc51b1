"""Register tiles: the inner loops of matrix products and softmax on the CPU, as LLVM vector code.

LLVM vectorises one accumulator well. Twelve at a time, which is what keeps both multipliers of a
core busy, it takes only when they are vectors from the start; so these loops are emitted as such.
A matrix is a tuple (`at(array, offset)`, strides in elements). It is not the array itself, whose
references numba would count, atomically, at every tile.
"""

from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from agentserve_kernels.scalar import emit_exp

_WIDE = binding.get_host_cpu_features().get("avx512f", False)
WIDTH = 16 if _WIDE else 8  # float32 in a register
ROWS = 6  # of the largest outer tile: 12 sums of 16 registers, or with AVX-512 24 of 32
VECTORS = 4 if _WIDE else 2
COLUMNS = VECTORS * WIDTH

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = ir.VectorType(_F32, WIDTH)
_WORDS = ir.VectorType(_I32, WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)
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


@intrinsic
def after(typing_context: Any, pointer: Any, offset: Any) -> Any:
    """Return the pointer to what lies `offset` elements further on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of element `offset` of a contiguous array, to be read soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(call, [pointer, _I32(0), _I32(3), _I32(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


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
        operands = [
            part for n in (0, 1, 3) for part in _matrix(context, builder, signature, args, n)
        ]
        operands.append(args[2])
        name = f"dot_tile_{kind}_{shape[0]}_{shape[1]}"
        tile = _function(builder.module, name, [operand.type for operand in operands])
        if tile.is_declaration:
            _emit_dot(tile, kind, shape)
        builder.call(tile, operands)
        return context.get_dummy_value()

    return types.void(weight, x, types.intp, out, rows, columns), generate


def _emit_dot(function: Any, kind: Any, shape: tuple[int, int]) -> None:
    builder = ir.IRBuilder(function.append_basic_block())
    weights, w_step, inputs, x_step, target, step, length = function.args
    tile = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    sums = {at: cgutils.alloca_once_value(builder, _ZERO) for at in tile}
    for place in sums.values():
        builder.store(_ZERO, place)
    w_rows = _rows(builder, w_step, shape[0])
    x_rows = _rows(builder, x_step, shape[1])
    whole = builder.and_(length, _I64(-WIDTH))
    with cgutils.for_range_slice(builder, _I64(0), whole, _I64(WIDTH)) as (k, _):
        lanes = [_at(builder, inputs, builder.add(row, k)) for row in x_rows]
        for i, row in enumerate(w_rows):
            wide = _load(builder, kind, weights, builder.add(row, k))
            for j in range(shape[1]):
                _accumulate(builder, sums[i, j], wide, lanes[j])
    o_rows = _rows(builder, step, shape[1])
    places = {(i, j): builder.gep(target, [builder.add(o_rows[j], _I64(i))]) for i, j in tile}
    for j in range(shape[1]):
        totals = _totals(builder, [builder.load(sums[i, j]) for i in range(shape[0])])
        for i, total in enumerate(totals):
            builder.store(total, places[i, j])
    with cgutils.for_range_slice(builder, whole, length, _I64(1)) as (k, _):
        for i, j in tile:
            one = _load_one(builder, kind, weights, builder.add(w_rows[i], k))
            other = _load_one(builder, types.float32, inputs, builder.add(x_rows[j], k))
            _accumulate(builder, places[i, j], one, other)
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
    COLUMNS columns to the next) of float32, or of bfloat16 as uint16; out: (pointer, row stride) of
    float32. `rows` and `vectors` are constants, as in `dot_tile`.
    """
    shape = (rows.literal_value, vectors.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[1][0].dtype
        operands = [
            part for n in (0, 1, 3) for part in _matrix(context, builder, signature, args, n)
        ]
        operands += [args[2], cgutils.as_bool_bit(builder, args[4])]
        name = f"outer_tile_{kind}_{shape[0]}_{shape[1]}"
        tile = _function(builder.module, name, [operand.type for operand in operands])
        if tile.is_declaration:
            _emit_outer(tile, kind, shape)
        builder.call(tile, operands)
        return context.get_dummy_value()

    return types.void(left, right, types.intp, out, types.boolean, rows, vectors), generate


def _function(module: Any, name: str, operands: list[Any]) -> Any:
    """Return the function of that name, to be filled in where it is only a declaration.

    It is called and never inlined: amid the variables of the loops around it there would not be
    registers enough for its pointers.
    """
    kind = ir.FunctionType(ir.VoidType(), operands)
    function = cgutils.get_or_insert_function(module, kind, f"agentserve_{name}")
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    return function


def _emit_outer(function: Any, kind: Any, shape: tuple[int, int]) -> None:
    builder = ir.IRBuilder(function.append_basic_block())
    lefts, l_step, l_deep, rights, r_step, r_group, target, step, depth, add = function.args
    tile = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    sums = {at: cgutils.alloca_once_value(builder, _ZERO) for at in tile}
    l_rows = _rows(builder, l_step, shape[0])
    o_rows = _rows(builder, step, shape[0])
    groups = _rows(builder, r_group, -(-shape[1] // VECTORS))
    places = {(i, j): builder.add(o_rows[i], _I64(j * WIDTH)) for i, j in tile}
    with builder.if_else(add) as (then, otherwise):
        with then:
            for at in tile:
                builder.store(_at(builder, target, places[at]), sums[at])
        with otherwise:
            for at in tile:
                builder.store(_ZERO, sums[at])
    left = cgutils.alloca_once_value(builder, lefts)
    right = cgutils.alloca_once_value(builder, rights)
    with cgutils.for_range(builder, depth):
        ones: dict[int, Any] = {}
        lanes: dict[int, Any] = {}
        here, there = builder.load(left), builder.load(right)
        # The shorter side stays in registers, the other one passes through a single one.
        for i, j in sorted(tile, key=lambda at: at[shape[0] <= shape[1]]):
            if i not in ones:
                ones[i] = _splat(builder, builder.load(builder.gep(here, [l_rows[i]])))
            if j not in lanes:
                place = builder.add(groups[j // VECTORS], _I64(j % VECTORS * WIDTH))
                lanes[j] = _load(builder, kind, there, place)
            _accumulate(builder, sums[i, j], ones[i], lanes[j])
        builder.store(builder.gep(here, [l_deep]), left)
        builder.store(builder.gep(there, [r_step]), right)
    for at in tile:
        _put(builder, builder.load(sums[at]), target, places[at])
    builder.ret_void()


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
        lanes = [_I64(j * WIDTH) for j in range(VECTORS)]
        tops = [cgutils.alloca_once_value(builder, _at(builder, maxima, lane)) for lane in lanes]
        totals = [cgutils.alloca_once_value(builder, _ZERO) for _ in lanes]
        for lane, top, total in zip(lanes, tops, totals, strict=True):
            builder.store(_at(builder, maxima, lane), top)
            builder.store(_ZERO, total)
        with cgutils.for_range(builder, keys) as loop:
            row = builder.mul(loop.index, _I64(COLUMNS))
            for lane, top in zip(lanes, tops, strict=True):
                score, before = _at(builder, scores, builder.add(row, lane)), builder.load(top)
                larger = builder.fcmp_ordered(">", score, before)
                builder.store(builder.select(larger, score, before), top)
        with cgutils.for_range(builder, keys) as loop:
            row = builder.mul(loop.index, _I64(COLUMNS))
            for lane, top, total in zip(lanes, tops, totals, strict=True):
                place = builder.add(row, lane)
                less = builder.fsub(_at(builder, scores, place), builder.load(top))
                weight = emit_exp(builder, less)
                _put(builder, weight, scores, place)
                builder.store(builder.fadd(builder.load(total), weight), total)
        for lane, top, total in zip(lanes, tops, totals, strict=True):
            less = builder.fsub(_at(builder, maxima, lane), builder.load(top))
            factor = emit_exp(builder, less)
            _put(builder, factor, shrink, lane)
            _put(builder, builder.load(top), maxima, lane)
            kept = builder.fmul(_at(builder, sums, lane), factor)
            _put(builder, builder.fadd(kept, builder.load(total)), sums, lane)
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
        most = cgutils.alloca_once_value(builder, _ZERO)
        sums = cgutils.alloca_once_value(builder, _ZERO)
        builder.store(_splat(builder, before), most)
        builder.store(_ZERO, sums)
        with cgutils.for_range_slice(builder, _I64(0), keys, _I64(WIDTH)) as (k, _):
            score, so_far = _at(builder, scores, k), builder.load(most)
            larger = builder.fcmp_ordered(">", score, so_far)
            builder.store(builder.select(larger, score, so_far), most)
        largest = _largest(builder, builder.load(most))
        wide = _splat(builder, largest)
        with cgutils.for_range_slice(builder, _I64(0), keys, _I64(WIDTH)) as (k, _):
            weight = emit_exp(builder, builder.fsub(_at(builder, scores, k), wide))
            _put(builder, weight, scores, k)
            builder.store(builder.fadd(builder.load(sums), weight), sums)
        factor = emit_exp(builder, builder.fsub(before, largest))
        added = _totals(builder, [builder.load(sums)])[0]
        builder.store(builder.fadd(builder.fmul(builder.load(total), factor), added), total)
        builder.store(largest, top)
        builder.store(factor, shrink)
        return context.get_dummy_value()

    return types.void(scores, types.intp, top, total, shrink), generate


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


def _matrix(context: Any, builder: Any, signature: Any, args: Any, number: int) -> list[Any]:
    """Return the pointer of an argument, and its strides as int64."""
    kinds = signature.args[number].types
    parts = [builder.extract_value(args[number], part) for part in range(len(kinds))]
    strides = zip(parts[1:], kinds[1:], strict=True)
    return parts[:1] + [context.cast(builder, part, kind, types.intp) for part, kind in strides]


def _rows(builder: Any, stride: Any, count: int) -> list[Any]:
    return [builder.mul(stride, _I64(i)) for i in range(count)]


def _load(builder: Any, kind: Any, base: Any, index: Any) -> Any:
    """Read WIDTH stored elements, widened to float32; any alignment."""
    if kind == types.float32:
        return _at(builder, base, index)
    pointer = builder.bitcast(builder.gep(base, [index]), _HALVES.as_pointer())
    halves = builder.load(pointer, align=2)
    shifted = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * WIDTH))
    return builder.bitcast(shifted, _LANES)


def _load_one(builder: Any, kind: Any, base: Any, index: Any) -> Any:
    value = builder.load(builder.gep(base, [index]))
    if kind == types.float32:
        return value
    return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)


def _at(builder: Any, base: Any, index: Any) -> Any:
    """Read a register of float32; any alignment."""
    return builder.load(builder.bitcast(builder.gep(base, [index]), _LANES.as_pointer()), align=4)


def _put(builder: Any, lanes: Any, base: Any, index: Any) -> None:
    pointer = builder.bitcast(builder.gep(base, [index]), _LANES.as_pointer())
    builder.store(lanes, pointer, align=4)


def _splat(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(_LANES, ir.Undefined)
    one = builder.insert_element(nothing, value, _I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * WIDTH))


def _accumulate(builder: Any, place: Any, a: Any, b: Any) -> None:
    product = builder.fmul(a, b, flags=_FLAGS)
    builder.store(builder.fadd(product, builder.load(place), flags=_FLAGS), place)


def _totals(builder: Any, registers: list[Any]) -> list[Any]:
    """Return the sum of each register's lanes; three or four are summed together."""
    if len(registers) in (3, 4):
        first, second, third, fourth = (registers + registers[-1:])[:4]
        pairs = (_fold(builder, first, second, 1), _fold(builder, third, fourth, 1))
        lanes = _halve(builder, _fold(builder, *pairs, 2), 4)
        return [builder.extract_element(lanes, _I32(i)) for i in range(len(registers))]
    lanes = [_halve(builder, register, 1) for register in registers]
    return [builder.extract_element(one, _I32(0)) for one in lanes]


def _fold(builder: Any, left: Any, right: Any, size: int) -> Any:
    """Take turns with `size` lanes of each; add to the lower two of every four the upper two."""
    halves = []
    for start in (0, 2):
        lanes = []
        for four in range(0, WIDTH, 4):
            some = [four + start, four + start + 1]
            if size == 1:
                lanes += [some[0], some[0] + WIDTH, some[1], some[1] + WIDTH]
            else:
                lanes += [*some, *(lane + WIDTH for lane in some)]
        halves.append(builder.shuffle_vector(left, right, ir.Constant(_WORDS, lanes)))
    return builder.fadd(*halves, flags=_FLAGS)


def _halve(builder: Any, lanes: Any, end: int) -> Any:
    """Add the upper half of the lanes to the lower one until `end` are left."""
    count = WIDTH
    while count > end:
        count //= 2
        mask = ir.VectorType(_I32, count)
        nothing = ir.Constant(lanes.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(lanes, nothing, ir.Constant(mask, list(range(first, last))))
            for first, last in ((0, count), (count, 2 * count))
        )
        lanes = builder.fadd(low, high, flags=_FLAGS)
    return lanes


def _largest(builder: Any, lanes: Any) -> Any:
    numbers = [builder.extract_element(lanes, _I32(i)) for i in range(WIDTH)]
    while len(numbers) > 1:
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        numbers = [builder.select(builder.fcmp_ordered(">", a, b), a, b) for a, b in pairs]
    return numbers[0]
