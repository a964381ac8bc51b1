"""The forward pass on a CPU: numba kernels over float32 buffers that are kept between steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from agentserve_kernels.kv_write import norm_arrays
from agentserve_kernels.layer import LayerArrays, LayerStep
from agentserve_kernels.linear import bias_array, linear, pack
from agentserve_kernels.norm import add_rms_norm
from agentserve_kernels.paged_decode import decode_attention
from agentserve_kernels.paged_prefill import prefill_attention
from agentserve_kernels.tensors import Rotary, Workspace, view

from agentserve.model.batch import Step
from agentserve.model.spec import ModelSpec
from agentserve.model.weights import LayerWeights, Weights

Attend = Callable[[Any, int, Any, Any], None]


class CpuForward:
    """A `decoder.Forward`; its logits are a buffer that the next call overwrites."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, cache: torch.Tensor, rotary: Rotary
    ) -> None:
        """Pack the matrices anew, and empty `weights.layers`: a model fits into memory once only."""
        self._spec = spec
        self._cache = cache
        self._rotary = rotary
        self._workspace = Workspace()
        self._embedding, self._final_norm = weights.embedding, weights.final_norm
        self._head = pack(weights.head)
        self._layers = []
        while weights.layers:
            self._layers.append(_arrays(weights.layers.pop(0), spec.norm_eps))

    def __call__(self, step: Step) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits."""
        residual = self._embedding[step.tokens].float()
        delta = torch.zeros_like(residual)
        self._run_layers(step, residual, delta)
        residual, delta = residual[step.sampled], delta[step.sampled]
        final = torch.empty_like(residual)
        add_rms_norm(residual, delta, self._final_norm, self._spec.norm_eps, final)
        logits = self._workspace.take("logits", (final.shape[0], self._spec.vocab_size))
        return linear(final, self._head, None, logits)

    def _run_layers(self, step: Step, residual: torch.Tensor, delta: torch.Tensor) -> None:
        spec, tables = self._spec, step.tables.numpy()
        shape = (residual.shape[0], spec.heads, spec.head_dim)
        state = LayerStep(
            residual=residual.numpy(),
            delta=delta.numpy(),
            eps=np.float32(spec.norm_eps),
            query=self._workspace.take("query", shape).numpy(),
            attended=self._workspace.take("attended", shape).numpy(),
            cache=view(self._cache),
            place=(step.place.positions.numpy(), step.place.blocks.numpy()),
            rotary=(self._rotary.cos.numpy(), self._rotary.sin.numpy()),
            workspace=self._workspace,
        )
        attentions = self._attentions(step)
        for index, layer in enumerate(self._layers):
            state.before_attention(index, layer)
            for attend in attentions:
                attend(state.query, index, tables, state.attended)
            state.after_attention(layer)

    def _attentions(self, step: Step) -> list[Attend]:
        """Return what attends for the rows of the step: the single tokens, and each chunk."""
        cache, heads = self._cache, self._spec.heads
        chunks = [prefill_attention(cache, heads, chunk, self._workspace) for chunk in step.chunks]
        if not step.decode.rows.shape[0]:
            return chunks
        return [decode_attention(cache, heads, step.decode, self._workspace), *chunks]


def _arrays(layer: LayerWeights, eps: float) -> LayerArrays:
    return LayerArrays(
        input_norm=layer.input_norm.numpy(),
        qkv=pack(layer.qkv).panels,
        qkv_bias=bias_array(layer.qkv_bias),
        head_norm=norm_arrays(layer.head_norm(eps)),
        output=pack(layer.output).panels,
        output_bias=bias_array(layer.output_bias),
        mlp_norm=layer.mlp_norm.numpy(),
        gate_up=pack(layer.gate_up).panels,
        gate_up_bias=bias_array(layer.gate_up_bias),
        down=pack(layer.down).panels,
        down_bias=bias_array(layer.down_bias),
    )
