"""Tasks that threads take one by one: a thread that was kept waiting does fewer of them."""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def claim(typing_context: Any, counter: Any) -> Any:
    """Return the number in `counter`, an int64 array [1], and add one to it; atomic."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate


@njit(nogil=True, cache=True)
def share(number: int, count: int, least: int, threads: int) -> tuple[int, int]:
    """Return the first of `count` items of claim `number` and the one after its last.

    Half of what is left is divided by the threads (guided self-scheduling, Polychronopoulos and
    Kuck 1987), at least `least` at a time: large runs, of which the last are small.
    """
    first = end = 0
    for _ in range(number + 1):
        first = end
        end = min(count, first + max(least, (count - first) // (2 * threads)))
    return first, end
