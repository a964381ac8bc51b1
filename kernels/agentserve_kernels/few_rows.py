"""A decoder layer for a few single-token rows, as compiled calls around the attention.

Decoding one token takes about 300 us a layer; a dozen calls through torch with their checks would
add as much again. The arithmetic is that of the single kernels, which are called from here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from agentserve_kernels.activation import silu_rows
from agentserve_kernels.kv_write import write_rows
from agentserve_kernels.linear import stream
from agentserve_kernels.norm import norm_rows


@dataclass(frozen=True)
class LayerArrays:
    """One layer's weights as arrays: matrices as `linear.streamable` gives them.

    An absent bias is empty. `head_norm` is what `kv_write.norm_arrays` gives.
    """

    input_norm: Any
    qkv: Any
    qkv_bias: Any
    head_norm: tuple[Any, Any, Any]
    output: Any
    output_bias: Any
    mlp_norm: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any


@njit(nogil=True, cache=True)
def _linear(weight: Any, bias: Any, x: Any, out: Any) -> None:
    stream(weight, x, out)
    if bias.size:
        for row in range(out.shape[0]):
            for i in range(bias.size):
                out[row, i] += bias[i]


@njit(nogil=True, cache=True)
def _before(hidden: Any, weights: Any, pages: Any, place: Any, rotary: Any, query: Any) -> None:
    residual, delta, eps = hidden
    norm, qkv, bias, head_norm = weights
    normed = np.empty_like(residual)
    norm_rows(residual, delta, norm, eps, normed)
    projected = np.empty((residual.shape[0], qkv.shape[0]), np.float32)
    _linear(qkv, bias, normed, projected)
    write_rows(projected, pages, place, rotary, head_norm, query)


@njit(nogil=True, cache=True)
def _after(hidden: Any, output: Any, norm: Any, gate_up: Any, down: Any, attended: Any) -> None:
    residual, delta, eps = hidden
    rows = residual.shape[0]
    _linear(output[0], output[1], attended, delta)
    normed = np.empty_like(residual)
    norm_rows(residual, delta, norm, eps, normed)
    both = np.empty((rows, gate_up[0].shape[0]), np.float32)
    _linear(gate_up[0], gate_up[1], normed, both)
    product = np.empty((rows, both.shape[1] // 2), np.float32)
    silu_rows(both, product)
    _linear(down[0], down[1], product, delta)


@dataclass(frozen=True)
class FewRows:
    """What stays the same over the layers of a step; all arrays.

    residual, delta: [T, hidden], updated in place (the layer's output is their sum); query,
    attended: [T, heads, D] scratch; cache as in `tensors.Pages`; place: (positions, blocks);
    rotary: (cos, sin).
    """

    residual: Any
    delta: Any
    eps: Any
    query: Any
    attended: Any
    cache: Any
    place: tuple[Any, Any]
    rotary: tuple[Any, Any]

    def before_attention(self, index: int, layer: LayerArrays) -> None:
        """Norm, QKV projection, rotary embedding and KV write; leaves the queries in `query`."""
        _before(
            (self.residual, self.delta, self.eps),
            (layer.input_norm, layer.qkv, layer.qkv_bias, layer.head_norm),
            (self.cache, index),
            self.place,
            self.rotary,
            self.query,
        )

    def after_attention(self, layer: LayerArrays) -> None:
        """Output projection, norm and feed-forward from `attended`."""
        _after(
            (self.residual, self.delta, self.eps),
            (layer.output, layer.output_bias),
            layer.mlp_norm,
            (layer.gate_up, layer.gate_up_bias),
            (layer.down, layer.down_bias),
            self.attended.reshape(self.residual.shape[0], -1),
        )
