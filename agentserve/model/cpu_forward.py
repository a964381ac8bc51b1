"""The forward pass on a CPU: numba kernels over float32 buffers that are kept between steps."""

from typing import Any

import numpy as np
import torch
from agentserve_kernels.activation import silu_mul
from agentserve_kernels.few_rows import FewRows, LayerArrays
from agentserve_kernels.kv_write import kv_write, norm_arrays
from agentserve_kernels.linear import linear, streamable
from agentserve_kernels.norm import add_rms_norm
from agentserve_kernels.paged_decode import decode_attention, paged_decode
from agentserve_kernels.paged_prefill import paged_prefill
from agentserve_kernels.tensors import FEW_ROWS, Pages, Rotary, Workspace, view

from agentserve.model.batch import Step
from agentserve.model.spec import ModelSpec
from agentserve.model.weights import LayerWeights, Weights


class CpuForward:
    """A `decoder.Forward`; its logits are a buffer that the next call overwrites."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, cache: torch.Tensor, rotary: Rotary
    ) -> None:
        self._spec = spec
        self._cache = cache
        self._weights = weights
        self._rotary = rotary
        self._workspace = Workspace()
        self._arrays = [_arrays(layer, spec.norm_eps) for layer in weights.layers]

    def __call__(self, step: Step) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits."""
        spec, weights = self._spec, self._weights
        residual = weights.embedding[step.tokens].float()
        delta = torch.zeros_like(residual)
        if step.chunks or step.tokens.shape[0] > FEW_ROWS:
            self._many_rows(step, residual, delta)
        else:
            self._few_rows(step, residual, delta)
        residual, delta = residual[step.sampled], delta[step.sampled]
        final = torch.empty_like(residual)
        add_rms_norm(residual, delta, weights.final_norm, spec.norm_eps, final)
        logits = self._take("logits", final.shape[0], spec.vocab_size)
        return linear(final, weights.head, None, logits, self._workspace)

    def _few_rows(self, step: Step, residual: torch.Tensor, delta: torch.Tensor) -> None:
        rows, tables = residual.shape[0], step.tables.numpy()
        shape = (rows, self._spec.heads, self._spec.head_dim)
        few = FewRows(
            residual=residual.numpy(),
            delta=delta.numpy(),
            eps=np.float32(self._spec.norm_eps),
            query=self._take("query", *shape).numpy(),
            attended=self._take("attended", *shape).numpy(),
            cache=view(self._cache),
            place=(step.place.positions.numpy(), step.place.blocks.numpy()),
            rotary=(self._rotary.cos.numpy(), self._rotary.sin.numpy()),
        )
        attend = decode_attention(self._cache, self._spec.heads, step.decode, self._workspace)
        for index, layer in enumerate(self._arrays):
            few.before_attention(index, layer)
            attend(few.query, index, tables, few.attended)
            few.after_attention(layer)

    def _many_rows(self, step: Step, residual: torch.Tensor, delta: torch.Tensor) -> None:
        eps, normed = self._spec.norm_eps, self._take("normed", *residual.shape)
        for index, layer in enumerate(self._weights.layers):
            add_rms_norm(residual, delta, layer.input_norm, eps, normed)
            attended = self._attend(index, layer, normed, step)
            linear(attended, layer.output, layer.output_bias, delta, self._workspace)
            add_rms_norm(residual, delta, layer.mlp_norm, eps, normed)
            self._mlp(layer, normed, delta)

    def _attend(
        self, index: int, layer: LayerWeights, normed: torch.Tensor, step: Step
    ) -> torch.Tensor:
        spec, rows = self._spec, normed.shape[0]
        qkv = self._take("qkv", rows, layer.qkv.shape[0])
        linear(normed, layer.qkv, layer.qkv_bias, qkv, self._workspace)
        norm = layer.head_norm(spec.norm_eps)
        query = self._take("query", rows, spec.heads, spec.head_dim)
        pages = Pages(self._cache, index, step.tables)
        kv_write(qkv, pages, step.place, self._rotary, norm, query)
        out = self._take("attended", rows, spec.heads, spec.head_dim)
        if step.decode.rows.shape[0]:
            paged_decode(query, pages, step.decode, out, self._workspace)
        for chunk in step.chunks:
            paged_prefill(query, pages, chunk, out, self._workspace)
        return out.view(rows, -1)

    def _mlp(self, layer: LayerWeights, normed: torch.Tensor, delta: torch.Tensor) -> None:
        rows, inner = normed.shape[0], self._spec.inner_size
        gate_up = self._take("gate_up", rows, 2 * inner)
        linear(normed, layer.gate_up, layer.gate_up_bias, gate_up, self._workspace)
        product = silu_mul(gate_up, self._take("product", rows, inner))
        linear(product, layer.down, layer.down_bias, delta, self._workspace)

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        return self._workspace.take(name, shape)


def _arrays(layer: LayerWeights, eps: float) -> LayerArrays:
    def bias(tensor: torch.Tensor | None) -> Any:
        return np.empty(0, np.float32) if tensor is None else tensor.numpy()

    return LayerArrays(
        input_norm=layer.input_norm.numpy(),
        qkv=streamable(layer.qkv),
        qkv_bias=bias(layer.qkv_bias),
        head_norm=norm_arrays(layer.head_norm(eps)),
        output=streamable(layer.output),
        output_bias=bias(layer.output_bias),
        mlp_norm=layer.mlp_norm.numpy(),
        gate_up=streamable(layer.gate_up),
        gate_up_bias=bias(layer.gate_up_bias),
        down=streamable(layer.down),
        down_bias=bias(layer.down_bias),
    )
