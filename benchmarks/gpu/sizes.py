"""The sizes of the measurements: an 8B-like model on a GPU, a toy with --tiny."""

from dataclasses import dataclass

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


def spec(layers: int, **changes: int) -> ModelSpec:
    """Return a model of 8 billion parameters (with 36 layers), shaped like Qwen3-8B."""
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "inner_size": 12288,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "max_context": 84 * 1024,
    } | changes
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        layers=layers,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        head_norm=True,
        tied_embeddings=False,
        **sizes,
    )


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
TINY = Sizes(
    model=spec(
        2,
        vocab_size=211,
        hidden_size=64,
        inner_size=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        max_context=512,
    ),
    full_layers=2,
    copied_blocks=20,
    repeats=2,
    product=64,
    products=2,
    steps=3,
    step_copies=4,
    contexts=(64, 128),
    new_tokens=40,
    chunk=48,
    exact_layers=2,
    turns=3,
    turn_tokens=(37, 4),
)
