"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

REPEATS = 5


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


def seconds_of_each(device: str, work: Callable[[int], Any], calls: int) -> float:
    """Return the median seconds of `work(i)`, i = 0 .. calls - 1, queued one behind the other.

    In a CUDA graph, as a decode step has them: the host's time for a launch does not count. On the
    CPU, where times mean nothing, one call is made.
    """
    if device == "cpu":
        return seconds_of(device, lambda: work(0))
    work(0)  # compiles
    replay = captured(work, calls)
    replay()  # touches memory
    return statistics.median(seconds_of(device, replay) / calls for _ in range(REPEATS))


def captured(work: Callable[[int], Any], calls: int) -> Callable[[], Any]:
    """Return what replays the calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            work(index)
    return graph.replay
