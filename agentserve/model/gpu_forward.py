"""The forward pass on a GPU: Triton kernels, and torch's matrix products between them.

Nothing here waits for the device or copies to it, so that a step can be captured as a CUDA graph:
what varies from step to step is in the tensors of `Inputs`. The residual is float32; everything
else has the dtype of the weights.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from agentserve_kernels.gpu.activation import silu_mul
from agentserve_kernels.gpu.kv_write import kv_write
from agentserve_kernels.gpu.norm import add_rms_norm
from agentserve_kernels.gpu.paged_attention import Spans, paged_attention
from agentserve_kernels.gpu.paged_decode import SplitPlan, paged_decode
from agentserve_kernels.tensors import DecodeRows, Pages, Placement, Rotary, Workspace
from numpy.typing import NDArray
from torch.nn.functional import linear

from agentserve.model.accelerator import open_accelerator
from agentserve.model.batch import Step
from agentserve.model.spec import ModelSpec
from agentserve.model.upload import Packed, Uploader
from agentserve.model.weights import LayerWeights, Weights


@dataclass(frozen=True)
class Inputs:
    """A step on the device. tokens: int64 [T]; sampled: int64 [S], rows whose logits are wanted.

    A row whose block is negative, and a single token of length 0, only fill the batch.
    """

    tokens: torch.Tensor
    place: Placement
    decode: DecodeRows
    spans: Spans
    sampled: torch.Tensor
    tables: torch.Tensor


STEP_ARRAYS = (
    "tokens",
    "positions",
    "blocks",
    "decode_rows",
    "decode_slots",
    "decode_lengths",
    "sampled",
    "span_rows",
    "span_counts",
    "span_slots",
    "span_lengths",
)


def step_arrays(step: Step) -> dict[str, NDArray[np.int64]]:
    """Return STEP_ARRAYS of a step that lies on the host, int64 each."""
    place, decode = step.place, step.decode
    tensors = (step.tokens, place.positions, place.blocks, *vars(decode).values(), step.sampled)
    chunks = [(c.row, c.count, c.slot, c.start + c.count) for c in step.chunks]
    spans = np.array(chunks, np.int64).reshape(-1, 4).T
    return dict(zip(STEP_ARRAYS, (*(t.numpy() for t in tensors), *spans), strict=True))


def inputs(packed: Packed, tables: torch.Tensor, longest: int) -> Inputs:
    """Return the arrays of `step_arrays` on the device; no chunk has more than `longest` tokens."""
    tokens, positions, blocks, *lists = (packed[name] for name in STEP_ARRAYS)
    rows, slots, lengths, sampled, span_rows, span_counts, span_slots, span_lengths = lists
    return Inputs(
        tokens=tokens,
        place=Placement(positions, blocks),
        decode=DecodeRows(rows, slots, lengths),
        spans=Spans(span_rows, span_counts, span_slots, span_lengths, longest),
        sampled=sampled,
        tables=tables,
    )


def longest_chunk(step: Step) -> int:
    """Return the tokens of the longest chunk."""
    return max((chunk.count for chunk in step.chunks), default=0)


class GpuForward:
    """A `decoder.Forward` whose `run` is for steps that are on the device already."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, cache: torch.Tensor, rotary: Rotary
    ) -> None:
        self._spec = spec
        self._weights = replace(weights, layers=[_typed(layer) for layer in weights.layers])
        self._cache = cache
        self._rotary = rotary
        self._accelerator = open_accelerator(cache.device)
        self._upload = Uploader(self._accelerator)
        self._workspace = Workspace(cache.device)

    def __call__(self, step: Step) -> torch.Tensor:
        """Copy the step over, write its keys and values; return the sampled rows' logits."""
        packed = self._upload({**step_arrays(step), "tables": step.tables.numpy()})
        return self.run(inputs(packed, packed["tables"], longest_chunk(step))).float()

    def run(self, step: Inputs, workspace: Workspace | None = None) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits [S, vocab].

        They have the weights' dtype. The workspace keeps its memory as long as it lives: what is
        captured needs one of its own.
        """
        workspace = workspace or self._workspace
        weights, eps = self._weights, self._spec.norm_eps
        residual = weights.embedding[step.tokens].float()
        delta: torch.Tensor | None = None
        normed = residual.new_empty(residual.shape, dtype=weights.embedding.dtype)
        for index, layer in enumerate(weights.layers):
            add_rms_norm(residual, delta, layer.input_norm, eps, normed)
            attended = self._attend(normed, index, layer, step, workspace)
            delta = linear(attended, layer.output, layer.output_bias)
            add_rms_norm(residual, delta, layer.mlp_norm, eps, normed)
            gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
            inner = gate_up.new_empty((gate_up.shape[0], self._spec.inner_size))
            delta = linear(silu_mul(gate_up, inner), layer.down, layer.down_bias)
        assert delta is not None, "a model has a layer"
        residual, delta = residual[step.sampled], delta[step.sampled]
        final = add_rms_norm(residual, delta, weights.final_norm, eps, torch.empty_like(delta))
        return linear(final, weights.head)

    def _attend(
        self,
        normed: torch.Tensor,
        index: int,
        layer: LayerWeights,
        step: Inputs,
        workspace: Workspace,
    ) -> torch.Tensor:
        """Return the attention outputs [T, heads * D]."""
        spec, pages = self._spec, Pages(self._cache, index, step.tables)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        query = qkv.new_empty((qkv.shape[0], spec.heads, spec.head_dim))
        kv_write(qkv, pages, step.place, self._rotary, layer.head_norm(spec.norm_eps), query)
        out = torch.empty_like(query)
        paged_attention(query, pages, step.spans, out)
        # By the longest context there can be: a captured step must fit every length.
        plan = SplitPlan.balanced(
            step.decode.rows.shape[0],
            spec.kv_heads,
            spec.max_context,
            self._accelerator.processors,
        )
        paged_decode(query, pages, step.decode, out, plan, workspace)
        return out.flatten(1)


def _typed(layer: LayerWeights) -> LayerWeights:
    """Return the layer with biases in the dtype of its matrices, as torch's products want them."""

    def typed(bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(layer.qkv.dtype)

    return replace(
        layer,
        qkv_bias=typed(layer.qkv_bias),
        output_bias=typed(layer.output_bias),
        gate_up_bias=typed(layer.gate_up_bias),
        down_bias=typed(layer.down_bias),
    )
