"""A dense, config-driven decoder over paged, block-major KV, on the device where its cache is."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from agentserve_kernels.tensors import Rotary

from agentserve.model.batch import Step
from agentserve.model.spec import Llama3Scaling, ModelSpec
from agentserve.model.weights import Weights


class Forward(Protocol):
    """Runs a step over the weights and the cache that it was made with."""

    def __call__(self, step: Step) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits, [S, vocab]."""
        ...


MakeForward = Callable[[ModelSpec, Weights, torch.Tensor, Rotary], Forward]


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block's record: (layer, K/V, kv_head, token, dim)."""
    return spec.layers * 2 * spec.kv_heads * block_size * spec.head_dim * dtype.itemsize


def empty_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """Return [blocks, layers, 2, kv_heads, block_size, D]; memory is committed as it is written."""
    shape = (num_blocks, spec.layers, 2, spec.kv_heads, block_size, spec.head_dim)
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    # numpy asks for huge pages, of which attention over scattered blocks misses fewer.
    size = num_blocks * block_bytes(spec, block_size, dtype)
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)


def rotary_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32 [D / 2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    return frequencies if spec.rope_scaling is None else _stretch(frequencies, spec.rope_scaling)


def _stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide the low frequencies by `factor`, with a linear blend between the two bounds."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Decoder:
    """The model's weights and the KV cache, and one method that runs a step over them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        cache: torch.Tensor,
        make_forward: MakeForward | None = None,
    ) -> None:
        """Weights and cache are on one device; `make_forward` is that device's own by default."""
        self.spec = spec
        self.cache = cache
        self.weight_bytes = weights.bytes_per_step  # that one decode step reads
        angles = torch.outer(
            torch.arange(spec.max_context, dtype=torch.float32), rotary_frequencies(spec)
        )
        rotary = Rotary(angles.cos().to(cache.device), angles.sin().to(cache.device))
        make_forward = make_forward or device_forward(cache.device)
        self.implementation = make_forward(spec, weights, cache, rotary)

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits, float32 [S, vocab].

        The logits may be a buffer that the next call overwrites.
        """
        return self.implementation(step)


def device_forward(device: torch.device) -> MakeForward:
    """Return the implementation for `device`; a CPU's imports numba, a GPU's triton."""
    if device.type == "cpu":
        from agentserve.model.cpu_forward import CpuForward

        return CpuForward
    from agentserve.model.gpu_forward import GpuForward

    return GpuForward
