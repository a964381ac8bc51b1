"""The forward pass on a CPU: numba kernels over float32 buffers that are kept between steps."""

import torch
from agentserve_kernels.layers import Layers, LayersStep, run_layers
from agentserve_kernels.linear import linear, pack
from agentserve_kernels.norm import add_rms_norm
from agentserve_kernels.tensors import Rotary, Workspace

from agentserve.model.batch import Step
from agentserve.model.spec import ModelSpec
from agentserve.model.weights import Weights


class CpuForward:
    """A `decoder.Forward`; its logits are a buffer that the next call overwrites."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, cache: torch.Tensor, rotary: Rotary
    ) -> None:
        """Pack the matrices anew and empty `weights.layers`: a model fits into memory only once."""
        self._spec = spec
        self._cache = cache
        self._rotary = rotary
        self._workspace = Workspace()
        self._embedding, self._final_norm = weights.embedding, weights.final_norm
        self._head = pack(weights.head)
        self._layers = Layers(spec.layers, spec.norm_eps)
        for layer in range(spec.layers):
            self._layers.put(layer, weights.layers.pop(0))

    def __call__(self, step: Step) -> torch.Tensor:
        """Write the step's keys and values; return the sampled rows' logits."""
        residual = self._embedding[step.tokens].float()
        delta = torch.zeros_like(residual)
        work = LayersStep(
            residual=residual,
            delta=delta,
            cache=self._cache,
            tables=step.tables,
            place=step.place,
            rotary=self._rotary,
            decode=step.decode,
            chunks=step.chunks,
        )
        run_layers(self._layers, work, self._spec.heads, self._workspace)
        residual, delta = residual[step.sampled], delta[step.sampled]
        final = torch.empty_like(residual)
        add_rms_norm(residual, delta, self._final_norm, self._spec.norm_eps, final)
        logits = self._workspace.take("logits", (final.shape[0], self._spec.vocab_size))
        return linear(final, self._head, None, logits)
