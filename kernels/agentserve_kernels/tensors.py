"""What every kernel's wrapper needs: argument types, shape checks, array views, reused buffers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

STORAGE = (torch.float32, torch.bfloat16)
PARALLEL_ROWS = 16  # from here on, element-wise work is worth a parallel region


@dataclass(frozen=True)
class Pages:
    """The KV of one layer, block-major, and the block tables that lead into it.

    cache: [blocks, layers, 2, kv_heads, block_size, D] float32 or bfloat16, keys before values;
    tables: [slots, blocks a sequence] int32.
    """

    cache: torch.Tensor
    layer: int
    tables: torch.Tensor

    def check(self, heads: int, dim: int) -> None:
        """Raise ValueError unless both have the documented shape and dtype, for `heads` queries."""
        if heads % self.cache.shape[3]:
            raise ValueError(f"{heads} query heads do not share {self.cache.shape[3]} KV heads")
        check(
            "cache", self.cache, (*self.cache.shape[:2], 2, *self.cache.shape[3:5], dim), *STORAGE
        )
        check("tables", self.tables, tuple(self.tables.shape), torch.int32)


@dataclass(frozen=True)
class Rotary:
    """cos and sin of position * frequency: [positions, D / 2] float32 each."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm weights of query and key heads: [D] float32 each."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Placement:
    """Where each token of a step belongs: its position, and the block that holds it. int64 [T]."""

    positions: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class DecodeRows:
    """The step's single-token rows: N queries.

    rows: where each query and output lies in [T, ...]; slots: whose table it reads;
    lengths: tokens to attend to, its own included. int64 [N] each.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows row..row+count-1 of the step are positions start.. of the sequence in `slot`."""

    slot: int
    row: int
    start: int
    count: int


def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `tensor` is contiguous with that shape and one of the dtypes."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def view(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return the tensor's memory as an array; bfloat16 appears as its uint16 bits."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


class Workspace:
    """Named scratch buffers that are kept between calls.

    Scores and gathered keys of several MB would otherwise be mapped and page-faulted in every
    layer, which costs more than the arithmetic on them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialised float32 tensor; the previous one of this name is overwritten."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # Grow by half at least, so that a growing context reallocates a few times only.
            grown = size if buffer is None else max(size, buffer.numel() * 3 // 2)
            buffer = self._buffers[name] = torch.empty(grown, device=self._device)
        return buffer[:size].view(shape)
