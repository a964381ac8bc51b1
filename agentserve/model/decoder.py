"""The forward pass: a dense, config-driven decoder over paged, block-major KV."""

import math

import torch
from agentserve_kernels.activation import silu_mul
from agentserve_kernels.kv_write import HeadNorm, Rotary, kv_write
from agentserve_kernels.linear import linear
from agentserve_kernels.norm import add_rms_norm
from agentserve_kernels.paged_decode import paged_decode
from agentserve_kernels.paged_prefill import paged_prefill
from agentserve_kernels.tensors import Pages, Workspace

from agentserve.model.batch import Step
from agentserve.model.spec import Llama3Scaling, ModelSpec
from agentserve.model.weights import LayerWeights, Weights


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block's record: (layer, K/V, kv_head, token, dim)."""
    return spec.layers * 2 * spec.kv_heads * block_size * spec.head_dim * dtype.itemsize


def empty_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return [blocks, layers, 2, kv_heads, block_size, D]; memory is committed as it is written."""
    shape = (num_blocks, spec.layers, 2, spec.kv_heads, block_size, spec.head_dim)
    return torch.empty(shape, dtype=dtype)


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

    def __init__(self, spec: ModelSpec, weights: Weights, cache: torch.Tensor) -> None:
        self.spec = spec
        self.cache = cache
        self._weights = weights
        self._workspace = Workspace()
        angles = torch.outer(
            torch.arange(spec.max_context, dtype=torch.float32), rotary_frequencies(spec)
        )
        self._rotary = Rotary(angles.cos(), angles.sin())

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        return self._weights.bytes_per_step

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits, float32 [S, vocab].

        The logits are a buffer that the next call overwrites.
        """
        spec, weights = self.spec, self._weights
        rows = step.tokens.shape[0]
        residual = weights.embedding[step.tokens].float()
        delta = torch.zeros_like(residual)
        normed = self._take("normed", rows, spec.hidden_size)
        for index, layer in enumerate(weights.layers):
            add_rms_norm(residual, delta, layer.input_norm, spec.norm_eps, normed)
            attended = self._attend(index, layer, normed, step)
            linear(attended, layer.output, layer.output_bias, delta, self._workspace)
            add_rms_norm(residual, delta, layer.mlp_norm, spec.norm_eps, normed)
            self._mlp(layer, normed, delta)
        residual, delta = residual[step.sampled], delta[step.sampled]
        final = torch.empty_like(residual)
        add_rms_norm(residual, delta, weights.final_norm, spec.norm_eps, final)
        logits = self._take("logits", final.shape[0], spec.vocab_size)
        return linear(final, weights.head, None, logits, self._workspace)

    def _attend(
        self, index: int, layer: LayerWeights, normed: torch.Tensor, step: Step
    ) -> torch.Tensor:
        spec, rows = self.spec, normed.shape[0]
        qkv = self._take("qkv", rows, layer.qkv.shape[0])
        linear(normed, layer.qkv, layer.qkv_bias, qkv, self._workspace)
        norm = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norm = HeadNorm(layer.query_norm, layer.key_norm, spec.norm_eps)
        query = self._take("query", rows, spec.heads, spec.head_dim)
        pages = Pages(self.cache, index, step.tables)
        kv_write(qkv, pages, step.place, self._rotary, norm, query)
        out = self._take("attended", rows, spec.heads, spec.head_dim)
        if step.decode.rows.shape[0]:
            paged_decode(query, pages, step.decode, out, self._workspace)
        for chunk in step.chunks:
            paged_prefill(query, pages, chunk, out, self._workspace)
        return out.view(rows, -1)

    def _mlp(self, layer: LayerWeights, normed: torch.Tensor, delta: torch.Tensor) -> None:
        rows, inner = normed.shape[0], self.spec.inner_size
        gate_up = self._take("gate_up", rows, 2 * inner)
        linear(normed, layer.gate_up, layer.gate_up_bias, gate_up, self._workspace)
        product = silu_mul(gate_up, self._take("product", rows, inner))
        linear(product, layer.down, layer.down_bias, delta, self._workspace)

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        return self._workspace.take(name, shape)
