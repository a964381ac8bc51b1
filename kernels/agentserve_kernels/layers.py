"""All decoder layers of a step as one compiled call.

Decoding one token takes about 400 us a layer, in five parallel regions. Between two calls from
Python the other threads would fall asleep, and to wake them takes as long as a small matrix. The
arithmetic is that of the single kernels, which are called from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit

from agentserve_kernels.activation import silu_rows
from agentserve_kernels.kv_write import write_rows
from agentserve_kernels.linear import fill_panels, multiply, panel_kind
from agentserve_kernels.norm import norm_rows
from agentserve_kernels.paged_attention import attend, attention_scratch, plan_attention
from agentserve_kernels.tensors import Chunk, DecodeRows, Placement, Rotary, Workspace, view

_VECTORS = (
    "input_norm",
    "qkv_bias",
    "query_norm",
    "key_norm",
    "output_bias",
    "mlp_norm",
    "gate_up_bias",
    "down_bias",
)
_MATRICES = ("qkv", "output", "gate_up", "down")


class Layers:
    """The weights of all layers, stacked; for each name an array [layers, ...].

    Matrices become panels as `linear.pack` makes them. An absent vector is empty.
    """

    def __init__(self, count: int, eps: float) -> None:
        self.eps = np.float32(eps)
        self._count = count
        self.arrays: dict[str, Any] = {}

    def put(self, layer: int, weights: Any) -> None:
        """Copy the attributes of `weights` that `_VECTORS` and `_MATRICES` name.

        Vectors are float32 or None, matrices as `linear.pack` takes them.
        """
        for name in _VECTORS:
            vector = getattr(weights, name)
            array = np.empty(0, np.float32) if vector is None else vector.numpy()
            self._room(name, array.shape, np.float32)[layer] = array
        for name in _MATRICES:
            matrix = getattr(weights, name)
            fill_panels(matrix, self._room(name, *panel_kind(matrix))[layer])

    def _room(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        if name not in self.arrays:
            # One allocation for all layers: numpy asks for huge pages for it.
            self.arrays[name] = np.empty((self._count, *shape), dtype)
        return self.arrays[name]


@dataclass(frozen=True)
class LayersStep:
    """What a step of T tokens runs on.

    residual, delta: [T, hidden] float32, updated in place (the output is their sum); cache, tables
    as in `tensors.Pages`.
    """

    residual: torch.Tensor
    delta: torch.Tensor
    cache: torch.Tensor
    tables: torch.Tensor
    place: Placement
    rotary: Rotary
    decode: DecodeRows
    chunks: Sequence[Chunk]


@njit(nogil=True, cache=True)
def _run(hidden: Any, weights: Any, pages: Any, step: Any, scratch: Any, threads: int) -> None:
    residual, delta, eps = hidden
    vectors, matrices = weights
    input_norm, qkv_bias, query_norm, key_norm, output_bias, mlp_norm, both_bias, down_bias = (
        vectors
    )
    qkv, output, gate_up, down = matrices
    cache, tables = pages
    place, rotary, decode, groups = step
    normed, projected, query, attended, both, product, attention = scratch
    joined = attended.reshape(residual.shape[0], -1)
    for layer in range(qkv.shape[0]):
        norm_rows(residual, delta, input_norm[layer], eps, normed)
        multiply(qkv[layer], qkv_bias[layer], normed, projected, threads)
        head_norm = (query_norm[layer], key_norm[layer], eps)
        write_rows(projected, (cache, layer), place, rotary, head_norm, query)
        attend(query, (cache, layer, tables), decode, groups, attention, attended)
        multiply(output[layer], output_bias[layer], joined, delta, threads)
        norm_rows(residual, delta, mlp_norm[layer], eps, normed)
        multiply(gate_up[layer], both_bias[layer], normed, both, threads)
        silu_rows(both, product)
        multiply(down[layer], down_bias[layer], product, delta, threads)


def run_layers(layers: Layers, step: LayersStep, heads: int, workspace: Workspace) -> None:
    """Run all layers over a step with `heads` query heads. The tensors are not checked."""
    rows, hidden = step.residual.shape
    kv_heads, dim = step.cache.shape[3], step.cache.shape[5]
    arrays = layers.arrays

    def take(name: str, *shape: int) -> Any:
        return workspace.take(name, (rows, *shape)).numpy()

    inner = arrays["down"].shape[2]
    scratch = (
        take("normed", hidden),
        take("qkv", (heads + 2 * kv_heads) * dim),
        take("query", heads, dim),
        take("attended", heads, dim),
        take("gate_up", 2 * inner),
        take("product", inner),
        attention_scratch(step.cache, heads, step.decode.rows.shape[0], workspace),
    )
    block_size = step.cache.shape[4]
    decode, groups = plan_attention(step.decode, step.chunks, step.tables, block_size)
    _run(
        (step.residual.numpy(), step.delta.numpy(), layers.eps),
        (tuple(arrays[name] for name in _VECTORS), tuple(arrays[name] for name in _MATRICES)),
        (view(step.cache), step.tables.numpy()),
        (
            (step.place.positions.numpy(), step.place.blocks.numpy()),
            (step.rotary.cos.numpy(), step.rotary.sin.numpy()),
            decode,
            groups,
        ),
        scratch,
        get_num_threads(),
    )
