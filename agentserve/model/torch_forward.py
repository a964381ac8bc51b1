"""The forward pass in torch operations alone, on any device: what the others are checked against.

Matrix products and attention run in the dtype of the weights and of the cache; between them the
activations are float32.
"""

import torch
from agentserve_kernels.reference import kv_write_reference, rms_norm_reference, silu_mul_reference
from agentserve_kernels.tensors import Chunk, Pages, Placement, Rotary
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention

from agentserve.model.batch import Step
from agentserve.model.spec import ModelSpec
from agentserve.model.weights import LayerWeights, Weights

# Not cuDNN's: it plans anew for every length, and a sequence has another one at each step.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TorchForward:
    """A `decoder.Forward`. A step's tables and lists are on the CPU; it copies them over."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, cache: torch.Tensor, rotary: Rotary
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._cache = cache
        self._rotary = rotary

    def __call__(self, step: Step) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits."""
        weights, eps, device = self._weights, self._spec.norm_eps, self._cache.device
        place = Placement(step.place.positions.to(device), step.place.blocks.to(device))
        tables, queries = step.tables.to(device), _queries(step)
        hidden = weights.embedding[step.tokens.to(device)].float()
        for index, layer in enumerate(weights.layers):
            normed = rms_norm_reference(hidden, layer.input_norm, eps)
            qkv = _linear(normed, layer.qkv, layer.qkv_bias)
            pages = Pages(self._cache, index, tables)
            query = kv_write_reference(qkv, pages, place, self._rotary, layer.head_norm(eps))
            with sdpa_kernel(ATTENTION):
                attended = _attend(query, pages, queries)
            hidden = hidden + _linear(attended, layer.output, layer.output_bias)
            hidden = hidden + _feed_forward(rms_norm_reference(hidden, layer.mlp_norm, eps), layer)
        sampled = hidden[step.sampled.to(device)]
        return _linear(rms_norm_reference(sampled, weights.final_norm, eps), weights.head, None)


def _queries(step: Step) -> list[Chunk]:
    """Return what attends: the chunks, and each single token as a chunk of one."""
    decode = step.decode
    singles = zip(decode.slots.tolist(), decode.rows.tolist(), decode.lengths.tolist(), strict=True)
    return step.chunks + [Chunk(slot, row, length - 1, 1) for slot, row, length in singles]


def _attend(query: torch.Tensor, pages: Pages, queries: list[Chunk]) -> torch.Tensor:
    out = torch.empty_like(query)
    for chunk in queries:
        keys, values = _gather(pages, chunk.slot, chunk.start + chunk.count)
        rows = slice(chunk.row, chunk.row + chunk.count)
        heads = query[rows].to(keys.dtype).transpose(0, 1)
        attended = scaled_dot_product_attention(
            heads[None], keys[None], values[None], attn_mask=_mask(chunk, query), enable_gqa=True
        )
        out[rows] = attended[0].transpose(0, 1)
    return out.flatten(1)


def _mask(chunk: Chunk, query: torch.Tensor) -> torch.Tensor | None:
    """Return which keys each token of the chunk sees; None: the one token sees all."""
    end = chunk.start + chunk.count
    if chunk.count == 1:
        return None
    if query.is_cuda:
        bias: torch.Tensor = causal_lower_right(chunk.count, end)  # a flag for FlashAttention
        return bias
    return torch.ones(chunk.count, end, dtype=torch.bool).tril(chunk.start)


def _gather(pages: Pages, slot: int, length: int) -> torch.Tensor:
    """Return keys and values [2, kv_heads, length, D] of one sequence, as they are stored."""
    kv_heads, block_size, dim = pages.cache.shape[3:]
    table = pages.tables[slot, : -(-length // block_size)]
    blocks = pages.cache[table, pages.layer]
    return blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length]


def _feed_forward(normed: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    product = silu_mul_reference(_linear(normed, layer.gate_up, layer.gate_up_bias))
    return _linear(product, layer.down, layer.down_bias)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = linear(x.to(weight.dtype), weight).float()
    return out if bias is None else out + bias
