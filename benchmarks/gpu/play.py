"""The GPU runner on random weights, and one sequence that is played on it by hand-made plans."""

import random
import time
from typing import Any

import msgspec
import torch

from agentserve.engine.plan import (
    Copy,
    Row,
    SamplingParams,
    SlotAdd,
    SlotDrop,
    StepPlan,
    StepResult,
    TableAppend,
    pack,
)
from agentserve.model.decoder import Decoder, empty_cache
from agentserve.model.gpu_forward import GpuForward
from agentserve.model.gpu_runner import GpuRunner
from agentserve.model.spec import ModelSpec
from agentserve.model.weights import LayerWeights, Weights
from benchmarks.gpu.sizes import BLOCK_TOKENS

PATIENCE_S = 30.0  # for copies that were submitted
NOTHING = StepPlan(0, [], [], [], [], [], b"")


def dtype_of(device: str) -> torch.dtype:
    """Return bfloat16 but for the CPU: products of it are wrong in triton's interpreter."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def random_weights(spec: ModelSpec, device: str, dtype: torch.dtype) -> Weights:
    """Return matrices of small normal numbers, seeded, made on the device."""
    generator = torch.Generator(device).manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty((rows, columns), dtype=dtype, device=device)
        return weight.normal_(0, columns**-0.5, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device=device)

    hidden, dim = spec.hidden_size, spec.head_dim
    query, key = spec.heads * dim, spec.kv_heads * dim
    layers = [
        LayerWeights(
            input_norm=ones(hidden),
            qkv=matrix(query + 2 * key, hidden),
            qkv_bias=None,
            query_norm=ones(dim) if spec.head_norm else None,
            key_norm=ones(dim) if spec.head_norm else None,
            output=matrix(hidden, query),
            output_bias=None,
            mlp_norm=ones(hidden),
            gate_up=matrix(2 * spec.inner_size, hidden),
            gate_up_bias=None,
            down=matrix(hidden, spec.inner_size),
            down_bias=None,
        )
        for _ in range(spec.layers)
    ]
    return Weights(
        embedding=matrix(spec.vocab_size, hidden),
        layers=layers,
        final_norm=ones(hidden),
        head=matrix(spec.vocab_size, hidden),
    )


def random_decoder(spec: ModelSpec, device: str, dtype: torch.dtype, blocks: int) -> Decoder:
    """Return a decoder with random weights, and finite numbers for the KV that nobody wrote."""
    cache = empty_cache(spec, blocks, BLOCK_TOKENS, dtype, device).normal_()
    return Decoder(spec, random_weights(spec, device, dtype), cache, GpuForward)


def make_runner(
    decoder: Decoder, slots: int, *, host_blocks: int = 0, graphs: bool = True
) -> GpuRunner:
    """Return the GPU runner of a model that has no name."""
    return GpuRunner(
        decoder,
        model="random",
        identity="random",
        max_slots=slots,
        host_blocks=host_blocks,
        graphs=graphs,
    )


def random_tokens(spec: ModelSpec, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(spec.vocab_size), k=count)


class Play:
    """One runner with both tiers, and the sequence in its only slot."""

    def __init__(self, spec: ModelSpec, device: str, blocks: int, host_blocks: int) -> None:
        self.spec = spec
        decoder = random_decoder(spec, device, dtype_of(device), blocks)
        self.cache = decoder.cache
        self.runner = make_runner(decoder, 1, host_blocks=host_blocks)
        self.block_bytes = self.runner.info.groups[0].block_bytes
        self._steps = self._tickets = 0

    def open(self, blocks: list[int]) -> None:
        """Put a sequence whose KV is in `blocks`, in order, into the slot."""
        self._step(added=[SlotAdd(0, 0, SamplingParams(), 0)], appended=[TableAppend(0, 0, blocks)])

    def close(self) -> None:
        self._step(dropped=[SlotDrop(0, 0)])

    def feed(self, start: int, tokens: list[int], chunk: int) -> int:
        """Compute `tokens` at positions start.. in chunks; return the next token, greedy."""
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            row = Row(0, start + first, len(part), sample=first + chunk >= len(tokens))
            result = self._step(rows=[row], tokens=pack(part))
        if not all(result.finite):
            raise ValueError(f"no finite logits after {start + len(tokens)} tokens")
        return result.tokens[0][0]

    def move(self, kind: str, pairs: list[tuple[int, int]], tail: int = BLOCK_TOKENS) -> None:
        """Save or load (source, target) blocks, the last one with `tail` tokens; wait for it.

        Raises TimeoutError when a ticket does not come back.
        """
        first = self._tickets
        self._tickets += len(pairs)
        copies = [
            Copy(first + n, 0, *pair, BLOCK_TOKENS if n + 1 < len(pairs) else tail, kind)
            for n, pair in enumerate(pairs)
        ]
        missing = {copy.ticket for copy in copies}
        missing.difference_update(self._step(copies=copies, wait=True).tickets)
        deadline = time.monotonic() + PATIENCE_S
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(missing)} of {len(copies)} copies did not end")
            missing.difference_update(self._step(wait=True).tickets)

    def _step(self, **changes: Any) -> StepResult:
        plan = msgspec.structs.replace(NOTHING, step=self._steps, **changes)
        self._steps += 1
        handle = self.runner.launch(plan)
        self.runner.sample(handle, {})
        return self.runner.collect(handle)
