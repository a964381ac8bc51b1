"""A straight line through measured points, with the uncertainty of its slope."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np


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
    if len(xs) < 3 or len(set(xs)) < 2:
        raise ValueError(f"a line needs 3 points with two different x, not {len(xs)}")
    (slope, intercept), covariance = np.polyfit(xs, ys, 1, cov=True)
    # Rounding can leave a variance just below 0 where all points are on the line.
    return Line(float(intercept), float(slope), math.sqrt(max(0.0, float(covariance[0, 0]))))
