"""Registers of float32: their width, and the instructions that tiles are emitted with."""

from typing import Any

from llvmlite import binding, ir
from numba import types

_WIDE = binding.get_host_cpu_features().get("avx512f", False)
WIDTH = 16 if _WIDE else 8  # float32 in a register
ROWS = 6  # of the largest outer tile: 12 sums of 16 registers, or with AVX-512 24 of 32
VECTORS = 4 if _WIDE else 2
COLUMNS = VECTORS * WIDTH

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = ir.VectorType(F32, WIDTH)
WORDS = ir.VectorType(I32, WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)
ZERO = ir.Constant(LANES, [0.0] * WIDTH)
# Sums may be reordered, but a NaN must stay one: the finite check is what finds a broken row.
FLAGS = ("reassoc", "contract", "arcp", "nsz")


def load_stored(builder: Any, kind: Any, base: Any, index: Any) -> Any:
    """Read WIDTH stored elements, widened to float32; any alignment."""
    if kind == types.float32:
        return load_lanes(builder, base, index)
    pointer = builder.bitcast(builder.gep(base, [index]), _HALVES.as_pointer())
    halves = builder.load(pointer, align=2)
    shifted = builder.shl(builder.zext(halves, WORDS), ir.Constant(WORDS, [16] * WIDTH))
    return builder.bitcast(shifted, LANES)


def load_pair(builder: Any, base: Any, index: Any) -> tuple[Any, Any]:
    """Read WIDTH words of two bfloat16 each: the lower halves and the upper ones, as float32."""
    pointer = builder.bitcast(builder.gep(base, [index]), WORDS.as_pointer())
    words = builder.load(pointer, align=4)
    low = builder.shl(words, ir.Constant(WORDS, [16] * WIDTH))
    high = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * WIDTH))
    return builder.bitcast(low, LANES), builder.bitcast(high, LANES)


def load_one(builder: Any, kind: Any, base: Any, index: Any) -> Any:
    """Read one stored element, widened to float32."""
    value = builder.load(builder.gep(base, [index]))
    if kind == types.float32:
        return value
    return builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), F32)


def load_lanes(builder: Any, base: Any, index: Any) -> Any:
    """Read a register of float32; any alignment."""
    return builder.load(builder.bitcast(builder.gep(base, [index]), LANES.as_pointer()), align=4)


def store_lanes(builder: Any, lanes: Any, base: Any, index: Any) -> None:
    """Write a register of float32; any alignment."""
    pointer = builder.bitcast(builder.gep(base, [index]), LANES.as_pointer())
    builder.store(lanes, pointer, align=4)


def splat(builder: Any, value: Any) -> Any:
    """Return a register that holds `value` in every lane."""
    nothing = ir.Constant(LANES, ir.Undefined)
    one = builder.insert_element(nothing, value, I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(WORDS, [0] * WIDTH))


def accumulate(builder: Any, place: Any, a: Any, b: Any) -> None:
    """Add a * b to the sum in `place`."""
    product = builder.fmul(a, b, flags=FLAGS)
    builder.store(builder.fadd(product, builder.load(place), flags=FLAGS), place)


def totals(builder: Any, registers: list[Any]) -> list[Any]:
    """Return the sum of each register's lanes; three or four are summed together."""
    if len(registers) in (3, 4):
        first, second, third, fourth = (registers + registers[-1:])[:4]
        pairs = (_fold(builder, first, second, 1), _fold(builder, third, fourth, 1))
        lanes = _halve(builder, _fold(builder, *pairs, 2), 4)
        return [builder.extract_element(lanes, I32(i)) for i in range(len(registers))]
    lanes = [_halve(builder, register, 1) for register in registers]
    return [builder.extract_element(one, I32(0)) for one in lanes]


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
        halves.append(builder.shuffle_vector(left, right, ir.Constant(WORDS, lanes)))
    return builder.fadd(*halves, flags=FLAGS)


def _halve(builder: Any, lanes: Any, end: int) -> Any:
    """Add the upper half of the lanes to the lower one until `end` are left."""
    while lanes.type.count > end:
        lanes = builder.fadd(*_split(builder, lanes), flags=FLAGS)
    return lanes


def _split(builder: Any, lanes: Any) -> tuple[Any, Any]:
    """Return the lower half of the lanes and the upper one."""
    count = lanes.type.count // 2
    mask, nothing = ir.VectorType(I32, count), ir.Constant(lanes.type, ir.Undefined)
    low, high = (
        builder.shuffle_vector(lanes, nothing, ir.Constant(mask, list(range(first, last))))
        for first, last in ((0, count), (count, 2 * count))
    )
    return low, high


def largest_lane(builder: Any, lanes: Any) -> Any:
    """Return the largest lane; which one with a NaN among them is open."""
    while lanes.type.count > 1:
        low, high = _split(builder, lanes)
        lanes = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    return builder.extract_element(lanes, I32(0))
