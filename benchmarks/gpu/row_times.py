"""How long the kernels take that work row by row or block by block, and sampling."""

from dataclasses import dataclass
from typing import Any

import torch
from agentserve_kernels.gpu.blocks import gather_blocks
from agentserve_kernels.gpu.norm import add_rms_norm
from agentserve_kernels.gpu.sampling import sample
from agentserve_kernels.gpu.sampling_rows import SamplingRows

from benchmarks.gpu.timing import seconds_of_each

FILTERS = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (1.0, 0, 1.0),
    "top_p": (1.0, 0, 0.9),
    "top_k and top_p": (1.0, 50, 0.9),
}


@dataclass(frozen=True)
class Sizes:
    """Rows and blocks that are moved, and rows that are sampled."""

    rows: tuple[int, ...]
    hidden: int
    block: tuple[int, ...]  # a record of the cache
    blocks: int  # gathered, out of four times as many
    sampled: int
    vocab: int


GPU = Sizes((64, 8192), 4096, (36, 2, 8, 16, 128), 256, 64, 151936)
TINY = Sizes((2,), 32, (1, 2, 1, 16, 8), 2, 1, 32)


def rows(device: str, sizes: Sizes) -> dict[str, Any]:
    """Time the kernels that move rows and blocks, in bytes a second, and sampling in seconds."""
    results: dict[str, Any] = {}
    for count in sizes.rows:
        residual = torch.randn((count, sizes.hidden), device=device)
        delta, weight = residual.bfloat16(), torch.ones(sizes.hidden, device=device)
        out = torch.empty_like(delta)
        seconds = seconds_of_each(
            device,
            lambda _, r=residual, d=delta, w=weight, o=out: add_rms_norm(r, d, w, 1e-6, o),
            20,
        )
        moved = 2 * residual.nbytes + delta.nbytes + out.nbytes
        results[f"add_rms_norm of {count}"] = rated(seconds, moved)
    shape = (4 * sizes.blocks, *sizes.block)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    ids = torch.randperm(4 * sizes.blocks, device=device)[: sizes.blocks]
    staging = torch.empty_like(cache[: sizes.blocks])
    seconds = seconds_of_each(device, lambda _: gather_blocks(cache, ids, staging), 2)
    results[f"gather_blocks of {sizes.blocks}"] = rated(seconds, 2 * staging.nbytes)
    for name, values in FILTERS.items():
        seconds = sampling(device, sizes, *values)
        results[f"sample {sizes.sampled}, {name}"] = {"seconds": seconds}
    return results


def rated(seconds: float, moved: int) -> dict[str, float]:
    return {"seconds": seconds, "gb_s": round(moved / seconds / 1e9, 1)}


def sampling(device: str, sizes: Sizes, temperature: float, top_k: int, top_p: float) -> float:
    count = sizes.sampled
    logits = torch.randn((count, sizes.vocab), device=device) * 3
    order = torch.arange(count, device=device)

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    drawn = SamplingRows(
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(0.0, torch.float32),
        order,
        order,
    )
    tokens, finite = column(0, torch.int32), column(0, torch.bool)
    return seconds_of_each(device, lambda _: sample(logits, drawn, tokens, finite), 4)
