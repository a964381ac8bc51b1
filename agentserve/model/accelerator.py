"""Where a GPU runner's work is queued: CUDA's current stream, or a CPU that does it at once.

The runner is the same on both, so that all of it but the device can be tested without one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

cuda: Any = torch.cuda  # its streams, events and graphs carry no types

WARM_UPS = 2  # runs before a capture: they compile kernels and let cuBLAS take its workspace
CPU_PROCESSORS = 8  # as if: so that the kernels divide long sequences there too


class Event(Protocol):
    """A place in the queue of work."""

    def synchronize(self) -> None:
        """Return when all work before it has ended."""
        ...


@dataclass(frozen=True)
class Captured:
    """Work that is queued anew by `replay`, reads the tensors it read and writes `output`."""

    replay: Callable[[], None]
    output: torch.Tensor


class Accelerator(Protocol):
    """A device and its queue."""

    device: torch.device
    page_locks: bool  # whether copies need page-locked host memory to be asynchronous
    processors: int

    def record(self) -> Event:
        """Return an event behind all work that has been queued so far."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """Run `work` and keep it for replays; it may neither wait nor take data from the host."""
        ...


def open_accelerator(device: torch.device) -> "Accelerator":
    """Return the accelerator of a CUDA device or of the CPU."""
    return Cuda(device) if device.type == "cuda" else Inline(device)


class Cuda:
    """The current stream of a GPU, which is made the current device: triton launches there."""

    page_locks = True

    def __init__(self, device: torch.device) -> None:
        cuda.set_device(device)
        self.device = device
        self.processors: int = cuda.get_device_properties(device).multi_processor_count
        self._pool: Any = None  # graphs run one after the other, so they share their scratch memory

    def record(self) -> Event:
        """Return an event behind all work of the current stream."""
        event: Event = cuda.current_stream(self.device).record_event()
        return event

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """Run `work` on a side stream, then capture it as a CUDA graph."""
        current, side = cuda.current_stream(self.device), cuda.Stream(self.device)
        side.wait_stream(current)
        with cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool):
            output = work()
        self._pool = self._pool or graph.pool()
        return Captured(graph.replay, output)


class _Past:
    """An event of the CPU, whose work has ended when the call that queues it returns."""

    def synchronize(self) -> None:
        """Return at once."""


class Inline:
    """The CPU: work runs when it is queued, and a capture is run again over the same tensors."""

    page_locks = False
    processors = CPU_PROCESSORS

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self) -> Event:
        """Return an event of the past."""
        return _Past()

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """Run `work` now, and at each replay."""
        output = work()

        def replay() -> None:
            output.copy_(work())

        return Captured(replay, output)
