"""A kernel with its arguments, ready to run: what wrappers run and the compile check compiles.

The check needs no GPU: it asks the wrappers for launches on tensors of the meta device, so that it
compiles what will run and not a list of signatures that somebody keeps.
"""

from dataclasses import dataclass
from typing import Any

import torch

STORAGE = (torch.float32, torch.bfloat16, torch.float16)
# Not compiled for single values: one kernel for all layers, none while a graph is captured.
VARYING = ["layer"]


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut: rows and keys of a tile (where it has them), warps, pipeline stages.

    Fixed by shape and dtype, never searched for at run time: another tile sums in another order,
    and the same step must give the same bits after a restart.
    """

    rows: int = 1
    keys: int = 1
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Launch:
    """One call of a Triton kernel. `arguments` are by name, constants (in capitals) included."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    tuning: Tuning = Tuning()

    def run(self) -> None:
        """Queue the kernel on the current stream; an empty grid does nothing.

        Raises ValueError unless all tensors are on one device, which must be the current one.
        """
        devices = {t.device for t in self.arguments.values() if isinstance(t, torch.Tensor)}
        if len(devices) != 1:
            raise ValueError(f"tensors on several devices: {', '.join(map(str, devices))}")
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. A multiply-add is one rounding, in every version of triton."""
        return {
            "num_warps": self.tuning.warps,
            "num_stages": self.tuning.stages,
            "enable_fp_fusion": True,
        }
