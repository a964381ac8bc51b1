"""A decoder layer around its attention, as two compiled calls on arrays.

Decoding one token takes about 300 us a layer; a dozen calls through torch with their checks would
add as much again. The arithmetic is that of the single kernels, which are called from here.
"""

from dataclasses import dataclass
from typing import Any

from numba import njit

from agentserve_kernels.activation import silu_rows
from agentserve_kernels.kv_write import write_rows
from agentserve_kernels.linear import multiply
from agentserve_kernels.norm import norm_rows
from agentserve_kernels.tensors import Workspace


@dataclass(frozen=True)
class LayerArrays:
    """One layer's weights: matrices as `linear.pack` gives their panels, biases as `bias_array`.

    `head_norm` is what `kv_write.norm_arrays` gives.
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
def _before(hidden: Any, weights: Any, pages: Any, place: Any, rotary: Any, outputs: Any) -> None:
    residual, delta, eps = hidden
    norm, qkv, bias, head_norm = weights
    normed, projected, query = outputs
    norm_rows(residual, delta, norm, eps, normed)
    multiply(qkv, bias, normed, projected)
    write_rows(projected, pages, place, rotary, head_norm, query)


@njit(nogil=True, cache=True)
def _after(hidden: Any, weights: Any, scratch: Any, attended: Any) -> None:
    residual, delta, eps = hidden
    output, output_bias, norm, gate_up, gate_up_bias, down, down_bias = weights
    normed, both, product = scratch
    multiply(output, output_bias, attended, delta)
    norm_rows(residual, delta, norm, eps, normed)
    multiply(gate_up, gate_up_bias, normed, both)
    silu_rows(both, product)
    multiply(down, down_bias, product, delta)


@dataclass(frozen=True)
class LayerStep:
    """What stays the same over the layers of a step of T tokens; all arrays.

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
    workspace: Workspace

    def before_attention(self, index: int, layer: LayerArrays) -> None:
        """Norm, QKV projection, rotary embedding and KV write; leaves the queries in `query`."""
        kv_heads, dim = self.cache.shape[3], self.query.shape[2]
        width = (self.query.shape[1] + 2 * kv_heads) * dim
        _before(
            (self.residual, self.delta, self.eps),
            (layer.input_norm, layer.qkv, layer.qkv_bias, layer.head_norm),
            (self.cache, index),
            self.place,
            self.rotary,
            (self._normed(), self._take("qkv", width), self.query),
        )

    def after_attention(self, layer: LayerArrays) -> None:
        """Output projection, norm and feed-forward from `attended`."""
        rows, inner = self.residual.shape[0], layer.down.shape[1]
        _after(
            (self.residual, self.delta, self.eps),
            (
                layer.output,
                layer.output_bias,
                layer.mlp_norm,
                layer.gate_up,
                layer.gate_up_bias,
                layer.down,
                layer.down_bias,
            ),
            (self._normed(), self._take("gate_up", 2 * inner), self._take("product", inner)),
            self.attended.reshape(rows, -1),
        )

    def _normed(self) -> Any:
        return self._take("normed", self.residual.shape[1])

    def _take(self, name: str, width: int) -> Any:
        return self.workspace.take(name, (self.residual.shape[0], width)).numpy()
