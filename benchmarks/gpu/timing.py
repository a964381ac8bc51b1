"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch


def synchronize(device: str) -> None:
    """Wait for everything that was queued on the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def seconds_of(device: str, work: Callable[[], Any]) -> float:
    """Return how long `work` takes from an idle device until the device is idle again."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def middle(values: Iterable[float]) -> float:
    """Return the median, rounded to microseconds."""
    return round(statistics.median(values), 6)
