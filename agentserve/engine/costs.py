"""What computing, copying and waiting cost, measured on the engine's own work.

The prefill time is a least-squares fit of the newest steps that had prefill in them; the reload
time comes from what the copier has moved; the price of device room from how full the device tier
is; the delay from how long turns have queued. Until something was measured, defaults stand in that
are right within an order of magnitude. Measurements that are no positive number are ignored.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from agentserve.engine.plan import Row, Traffic
from agentserve.kv.policy import Costs

STEPS = 512  # newest steps that are fitted
FIRST_FIT = 8  # steps
REFIT = 64  # steps between two fits
FIRST_PREFILL = (0.005, 1e-4, 1e-9)  # base, token and pair seconds, before the first fit
# How much the values before count in a fit, in samples: enough to settle what the steps leave
# open (all of one length, say), too little to bend what they show.
ANCHOR = 0.05
OUTLIER = 6.0  # times the median deviation; such steps (a compilation, a stall) are left out
TRIMS = 4  # fits in a row, each without the outliers of the one before
FIRST_BANDWIDTH = 8e9  # bytes/s, before anything was copied
TRAFFIC_FADES = 0.9  # weight of earlier copies with each later report
POOL_FREE, POOL_TIGHT = 0.80, 0.95  # share of the device tier in use where its price is 0 and 1
DELAYS = 64  # newest queue times of each kind
ENOUGH_DELAYS = 4


class CostModel:
    """Collects measurements; `costs` tells what follows from them."""

    def __init__(self, token_bytes: int, pool_tokens: int) -> None:
        """Take the KV bytes of one token in all groups, and the tokens that the device holds."""
        self._token_bytes = token_bytes
        self._pool_tokens = pool_tokens
        self._prefill = PrefillFit()
        self._loads, self._saves = Bandwidth(), Bandwidth()
        self._pressure = 0.0
        self._stayed: deque[float] = deque(maxlen=DELAYS)
        self._left: deque[float] = deque(maxlen=DELAYS)

    def step(self, rows: Iterable[Row], seconds: float) -> None:
        """Take note of how long a step took. Steps without prefill say nothing and are ignored."""
        self._prefill.step(rows, seconds)

    def traffic(self, traffic: Traffic) -> None:
        """Take note of what the copier has moved since its start."""
        self._loads.report(traffic.loaded_bytes, traffic.loaded_s)
        self._saves.report(traffic.saved_bytes, traffic.saved_s)

    def pool(self, used: int, demanded: int = 0, spare: int | None = None) -> None:
        """Take note of the device tier, in tokens: in use by anybody, and wanted by waiting turns.

        `spare`, when known, is what could be had at once: free, or idle with a host copy. Room that
        everybody who waits finds there has no price.
        """
        if spare is not None and demanded <= spare:
            self._pressure = 0.0
            return
        full = (used + demanded) / max(1, self._pool_tokens)
        self._pressure = min(max((full - POOL_FREE) / (POOL_TIGHT - POOL_FREE), 0.0), 1.0)

    def queued(self, seconds: float, *, resident: bool) -> None:
        """Take note of how long a returning turn waited, and whether its KV was on the device."""
        if math.isfinite(seconds) and seconds >= 0:
            (self._stayed if resident else self._left).append(seconds)

    def costs(self) -> Costs:
        """Return what things cost now."""
        base, token, pair = self._prefill.seconds
        bandwidth = self._loads.value or self._saves.value or FIRST_BANDWIDTH
        return Costs(
            reload_s=self._token_bytes / bandwidth,
            prefill_base_s=base,
            prefill_token_s=token,
            prefill_pair_s=pair,
            pool_tokens=self._pool_tokens,
            pressure=self._pressure,
            delay_s=self._delay(),
        )

    def _delay(self) -> float:
        """Return how much longer turns waited because their KV was gone; 0 until known."""
        if min(len(self._stayed), len(self._left)) < ENOUGH_DELAYS:
            return 0.0
        left, stayed = (sum(each) / len(each) for each in (self._left, self._stayed))
        return max(0.0, left - stayed)


class Bandwidth:
    """Bytes per second of one direction, newest copies first. 0 until something was copied."""

    def __init__(self) -> None:
        self._last = (0, 0.0)
        self._bytes, self._seconds = 0.0, 0.0
        self.value = 0.0

    def report(self, moved: int, seconds: float) -> None:
        """Take the counters since the copier's start; smaller ones mean that it started anew."""
        if moved < self._last[0] or seconds < self._last[1]:
            self._last = (0, 0.0)
        more, longer = moved - self._last[0], seconds - self._last[1]
        if more > 0 and 0 < longer < math.inf:
            self._last = (moved, seconds)
            self._bytes = self._bytes * TRAFFIC_FADES + more
            self._seconds = self._seconds * TRAFFIC_FADES + longer
            self.value = self._bytes / self._seconds


class PrefillFit:
    """`seconds`: (base, token, pair) of a step that computes x tokens after c.

    A step takes base + token * sum(x) + pair * sum(x * (c + x/2)) over its rows.
    """

    def __init__(self) -> None:
        self.seconds: tuple[float, float, float] = FIRST_PREFILL
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=STEPS)
        self._fit_in = FIRST_FIT

    def step(self, rows: Iterable[Row], seconds: float) -> None:
        """Take note of a step with prefill, and fit again when enough of them have come."""
        rows = list(rows)
        if not 0 < seconds < math.inf or all(row.count < 2 for row in rows):
            return
        tokens = sum(row.count for row in rows)
        pairs = sum(row.count * (row.start + row.count / 2) for row in rows)
        self._steps.append((1.0, tokens, pairs, seconds))
        self._fit_in -= 1
        if self._fit_in <= 0:
            self._fit_in = REFIT if len(self._steps) >= REFIT else len(self._steps)
            self._fit()

    def _fit(self) -> None:
        steps = np.array(self._steps)
        features, took = steps[:, :3], steps[:, 3]
        values, usual = np.array(self.seconds), np.ones(len(steps), dtype=bool)
        for _ in range(TRIMS):
            values = _not_negative(features[usual], took[usual], np.array(self.seconds))
            off = np.abs(features @ values - took)
            usual = off <= OUTLIER * np.median(off) + 1e-9
        base, token, pair = values.tolist()
        if token > 0 or pair > 0:
            self.seconds = (base, token, pair)


def _not_negative(
    features: NDArray[np.float64], took: NDArray[np.float64], before: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the least-squares values, none below 0, anchored to the values before."""
    scale = np.sqrt((features**2).mean(axis=0))
    free = np.ones(3, dtype=bool)
    values = np.zeros(3)
    while free.any():
        columns = scale[free]
        a = np.vstack([features[:, free] / columns, math.sqrt(ANCHOR) * np.eye(len(columns))])
        b = np.concatenate([took, math.sqrt(ANCHOR) * before[free] * columns])
        values = np.zeros(3)
        values[free] = np.linalg.lstsq(a, b, rcond=None)[0] / columns
        if values.min() >= 0:
            break
        free[int(np.argmin(values * scale))] = False
    return values
