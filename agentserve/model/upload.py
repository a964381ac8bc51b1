"""Everything that a step needs from the host, in one page-locked copy to the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentserve.model.accelerator import Accelerator, Event

ALIGNMENT = 16  # bytes: what triton compiles for; other pointers would be compiled for anew
BUFFERS = 2  # a step may be prepared while the copy of the one before is still queued

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Field:
    """Where an array lies in a buffer: from `start` on, in bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the field of a buffer of bytes, as a view."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return buffer[self.start : self.start + size].view(self.dtype).view(self.shape)


def layout(arrays: Arrays) -> tuple[dict[str, Field], int]:
    """Return where each array goes, one aligned behind the other, and the bytes of all."""
    fields, start = {}, 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(array[:0]).dtype
        fields[name] = Field(start, array.shape, dtype)
        start += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return fields, start


@dataclass(frozen=True)
class Packed:
    """Arrays on the device: one buffer of bytes, and a view of it for each name."""

    buffer: torch.Tensor
    fields: Mapping[str, Field]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name].of(self.buffer)


class _Staging:
    """A buffer on the host, and the event of the last copy from it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.copied: Event | None = None


class Uploader:
    """Copies through host buffers that take turns; each is written to once its copy has ended."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stagings = [_Staging() for _ in range(BUFFERS)]

    def __call__(self, arrays: Arrays) -> Packed:
        """Queue the copy; the arrays may be changed at once, the result is the caller's own."""
        fields, size = layout(arrays)
        staging = self._next(size)
        for name, array in arrays.items():
            fields[name].of(staging.memory).numpy()[...] = array
        buffer = torch.empty(size, dtype=torch.uint8, device=self._accelerator.device)
        buffer.copy_(staging.memory[:size], non_blocking=True)
        staging.copied = self._accelerator.record()
        return Packed(buffer, fields)

    def _next(self, size: int) -> _Staging:
        staging = self._stagings.pop(0)
        self._stagings.append(staging)
        if staging.copied is not None:
            staging.copied.synchronize()
        if staging.memory.numel() < size:
            self._grow(staging, size)
        return staging

    def _grow(self, staging: _Staging, size: int) -> None:
        pinned = self._accelerator.page_locks
        staging.memory = torch.empty(size * 3 // 2, dtype=torch.uint8, pin_memory=pinned)
