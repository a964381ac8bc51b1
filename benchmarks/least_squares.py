"""A straight line through measured points, with the uncertainty of its slope."""

import math
from collections.abc import Sequence

import msgspec


class Line(msgspec.Struct, frozen=True):
    """y = intercept + slope * x; `slope_error` is the slope's standard error."""

    intercept: float
    slope: float
    slope_error: float

    def at(self, x: float) -> float:
        """Return y."""
        return self.intercept + self.slope * x


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Return the least-squares line; at least three points with two different x are needed.

    The standard error assumes equal, independent scatter of all y. Raises ValueError for fewer
    points.
    """
    count = len(xs)
    mean_x, mean_y = math.fsum(xs) / count, math.fsum(ys) / count
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    if count < 3 or not spread:
        raise ValueError(f"a line needs 3 points with two different x, not {count}")
    pairs = list(zip(xs, ys, strict=True))
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
    intercept = mean_y - slope * mean_x
    left = math.fsum((y - intercept - slope * x) ** 2 for x, y in pairs)
    return Line(intercept, slope, math.sqrt(left / (count - 2) / spread))
