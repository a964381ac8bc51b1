"""What a model is: read from config.json and refused by name if any part of it is not built."""

from pathlib import Path
from typing import Any

import msgspec

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class UnsupportedModel(ValueError):
    """The model needs something that this engine does not have; the message names it."""


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Llama 3's RoPE scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelSpec(msgspec.Struct, frozen=True):
    """A dense decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    architecture: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    tied_embeddings: bool


class _Config(msgspec.Struct):
    """The keys of config.json that matter here; transformers' defaults where a key may lack."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


class _Named(msgspec.Struct):
    architectures: list[str] | None = None


def load_spec(directory: Path) -> ModelSpec:
    """Read `directory`/config.json.

    Raises UnsupportedModel for what is not built, FileNotFoundError without a config, and
    ValueError for one that is malformed.
    """
    return parse_spec((directory / "config.json").read_bytes())


def parse_spec(data: bytes) -> ModelSpec:
    """Return the spec of a config.json's bytes; raises as `load_spec`."""
    architecture = _architecture(data)
    try:
        config = msgspec.json.decode(data, type=_Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: {error}") from None
    _refuse_unbuilt(config)
    theta, scaling = _rope(config)
    bias = architecture == "Qwen2ForCausalLM" or config.attention_bias
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        max_context=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=bias,
        # Qwen2 has biases on q, k and v only; attention_bias means all four.
        output_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=config.mlp_bias,
        head_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=config.tie_word_embeddings,
    )


def _architecture(data: bytes) -> str:
    try:
        names = msgspec.json.decode(data, type=_Named).architectures or ["(none given)"]
    except msgspec.MsgspecError as error:
        raise ValueError(f"config.json: {error}") from None
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _refuse_unbuilt(config: _Config) -> None:
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"activation {config.hidden_act} is not supported, only silu")
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unknown")
        raise UnsupportedModel(f"quantised safetensors ({method}) are not supported")
    if config.partial_rotary_factor != 1.0:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    # Mistral's window counts whenever it is set; Qwen's only with use_sliding_window.
    window = config.sliding_window if config.use_sliding_window is not False else None
    other = set(config.layer_types or ()) - {"full_attention"}
    if other:
        raise UnsupportedModel(f"attention of type {', '.join(sorted(other))} is not supported")
    if window is not None and window < config.max_position_embeddings and not config.layer_types:
        raise UnsupportedModel(f"sliding window attention (window {window}) is not supported")


def _rope(config: _Config) -> tuple[float, Llama3Scaling | None]:
    """Read the layout of transformers 5 (rope_parameters) or the older one (rope_scaling)."""
    parameters = config.rope_parameters or config.rope_scaling or {}
    theta = parameters.get("rope_theta", config.rope_theta)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(f"RoPE scaling of type {kind} is not supported")
    scaling = None
    if kind == "llama3":
        parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        try:
            scaling = msgspec.convert(parameters, Llama3Scaling)
        except msgspec.ValidationError as error:
            raise ValueError(f"config.json: llama3 RoPE scaling: {error}") from None
    return 10000.0 if theta is None else float(theta), scaling
