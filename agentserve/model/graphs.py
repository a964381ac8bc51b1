"""Decode steps as CUDA graphs: one for each of a few batch sizes, shorter batches are filled up.

A graph reads one buffer of fixed layout, into which each step's arrays are copied on the device.
Rows that fill a batch have no block, no keys and the slot behind all others: no KV is touched, and
what they compute is thrown away.
"""

from collections.abc import Callable

import numpy as np
import torch
from agentserve_kernels.tensors import Workspace
from numpy.typing import NDArray

from agentserve.engine.plan import Row
from agentserve.model.accelerator import Accelerator, Captured
from agentserve.model.gpu_forward import STEP_ARRAYS
from agentserve.model.upload import Packed, layout

# The arrays of a decode step, and what a row has there that only fills the batch.
FILLING = {
    "tokens": 0,
    "positions": 0,
    "blocks": -1,
    "decode_rows": 0,
    "decode_slots": 0,
    "decode_lengths": 0,
    "sampled": 0,
}

Forward = Callable[[Packed, Workspace], torch.Tensor]  # a step's logits, from its arrays


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes that are captured: powers of 2 below `most`, and that."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if most == 1 else [*sizes, most]


def is_plain_decode(rows: list[Row]) -> bool:
    """Return whether every row is one token that samples the next."""
    return bool(rows) and all(row.count == 1 and row.sample for row in rows)


def filled(
    arrays: dict[str, NDArray[np.int64]], size: int, spare_slot: int
) -> dict[str, NDArray[np.int64]]:
    """Return the arrays of a decode step filled up to `size` rows; those of chunks stay empty."""
    numbers = np.arange(size)
    result = dict(arrays)
    for name, value in FILLING.items():
        result[name] = np.full(size, value, np.int64)
        result[name][: arrays[name].size] = arrays[name]
    result["decode_slots"][arrays["decode_slots"].size :] = spare_slot
    result["decode_rows"] = result["sampled"] = numbers
    return result


class _Graph:
    """The captured step of one batch size. The workspace is its own and must live as long."""

    def __init__(self, packed: Packed, workspace: Workspace, captured: Captured) -> None:
        self.packed = packed
        self.workspace = workspace
        self.captured = captured


class DecodeGraphs:
    """All captured sizes. The arrays of a step come first in its upload, in their own order."""

    def __init__(self, accelerator: Accelerator, forward: Forward, most: int) -> None:
        """`most`: rows of the largest batch, and the slot that is behind all others."""
        self._accelerator = accelerator
        self._forward = forward
        self._spare_slot = most
        self._sizes = graph_sizes(most)
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first: the others fit into its memory."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._captured(size)

    def fill(self, arrays: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Return the arrays of a decode step as its graph takes them."""
        rows = arrays["tokens"].size
        size = next(size for size in self._sizes if size >= rows)
        return filled(arrays, size, self._spare_slot)

    def replay(self, packed: Packed) -> torch.Tensor:
        """Return the logits of a step that was filled; the next replay may overwrite them."""
        graph = self._graphs[packed["tokens"].shape[0]]
        graph.packed.buffer.copy_(packed.buffer[: graph.packed.buffer.shape[0]])
        graph.captured.replay()
        return graph.captured.output

    def _captured(self, size: int) -> _Graph:
        nothing = {name: np.empty(0, np.int64) for name in STEP_ARRAYS}
        arrays = filled(nothing, size, self._spare_slot)
        fields, length = layout(arrays)
        device = self._accelerator.device
        packed = Packed(torch.empty(length, dtype=torch.uint8, device=device), fields)
        for name, array in arrays.items():
            packed[name].copy_(torch.from_numpy(array))
        workspace = Workspace(device)
        captured = self._accelerator.capture(lambda: self._forward(packed, workspace))
        return _Graph(packed, workspace, captured)
