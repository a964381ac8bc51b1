"""The sizes of the measurements: models of 8 billion parameters on a GPU, toys with --tiny."""

from dataclasses import dataclass
from typing import Any

import torch

from agentserve.model.spec import ModelSpec

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """What section `residency` measures with; `model` is also the KV block's record."""

    model: ModelSpec
    full_layers: int  # of the model that the results speak of
    copied_blocks: int  # each way, in a bandwidth measurement
    repeats: int
    product: int  # side of the square matrices that are multiplied beside copies
    products: int  # of them in a step
    steps: int
    step_copies: int  # each way, in a step
    contexts: tuple[int, ...]  # tokens of history that are resumed
    new_tokens: int  # of the turn that resumes
    chunk: int  # tokens computed in a step
    exact_layers: int
    turns: int
    turn_tokens: tuple[int, int]  # fed and generated in a turn


@dataclass(frozen=True)
class Measured:
    """What sections `model` and `batching` measure with."""

    model: ModelSpec
    dtype: torch.dtype
    kv_bytes: int  # of the pool of blocks, at most
    batches: tuple[int, ...]  # of decode steps
    contexts: tuple[int, ...]
    steps: int  # timed
    prefills: tuple[tuple[int, int], ...]  # new tokens in one step, tokens before them
    product: int  # side of the square matrices whose rate is the yardstick
    sessions: int  # of the trace: closed loops
    turns: int
    shared: int  # tokens of the prompt that all have in common
    new: int  # tokens that a turn brings
    output: int  # tokens of an answer


def spec(layers: int, **changes: Any) -> ModelSpec:
    """Return a model of 8 billion parameters (with 36 layers), shaped like Qwen3-8B."""
    sizes: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM",
        "head_norm": True,
        "rope_theta": 1e6,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "inner_size": 12288,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "max_context": 84 * 1024,
    } | changes
    return ModelSpec(
        layers=layers,
        norm_eps=1e-6,
        rope_scaling=None,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied_embeddings=False,
        **sizes,
    )


LLAMA = {
    "architecture": "LlamaForCausalLM",
    "head_norm": False,
    "vocab_size": 128256,
    "inner_size": 14336,
    "rope_theta": 5e5,
    "max_context": 66 * 1024,
}
GPU = Sizes(
    model=spec(36),
    full_layers=36,
    copied_blocks=400,
    repeats=5,
    product=8192,
    products=12,
    steps=20,
    step_copies=256,
    contexts=(8 * 1024, 32 * 1024, 80 * 1024),
    new_tokens=256,
    chunk=8 * 1024,
    exact_layers=4,
    turns=20,
    turn_tokens=(100, 20),
)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "inner_size": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "max_context": 256,
}
TINY = Sizes(
    model=spec(1, **SMALL),
    full_layers=1,
    copied_blocks=20,
    repeats=2,
    product=64,
    products=2,
    steps=3,
    step_copies=4,
    contexts=(16, 32),
    new_tokens=6,
    chunk=24,
    exact_layers=1,
    turns=2,
    turn_tokens=(9, 2),
)
GPU_MODEL = Measured(
    model=spec(32, **LLAMA),
    dtype=torch.bfloat16,
    kv_bytes=80 << 30,
    batches=(1, 8, 64),
    contexts=(1024, 8192, 65536),
    steps=16,
    prefills=((2048, 0), (8192, 0), (2048, 16384)),
    product=8192,
    sessions=16,
    turns=6,
    shared=1250,
    new=175,
    output=32,
)
# In float32, because the interpreter's products of bfloat16 are wrong.
TINY_MODEL = Measured(
    model=spec(1, **(LLAMA | SMALL)),
    dtype=torch.float32,
    kv_bytes=1 << 20,
    batches=(2,),
    contexts=(20, 40),
    steps=1,
    prefills=((6, 0), (4, 16)),
    product=64,
    sessions=2,
    turns=2,
    shared=12,
    new=4,
    output=3,
)
