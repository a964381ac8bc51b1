"""From a GGUF file to config.json and model.safetensors, tensor by tensor, without torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from agentserve.model.spec import UnsupportedModel

Progress = Callable[[int, int, str], None]
Array = NDArray[Any]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_STORED_AS_IS = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_QUANTISED = {
    GGMLQuantizationType[name]
    for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
}
# Llama 3 is the one family whose GGUF has rope_freqs; the bounds are the same in all its sizes.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert(reader: GGUFReader, directory: Path, progress: Progress | None = None) -> None:
    """Write config.json and model.safetensors with the names and layout of transformers.

    `progress` is called with (bytes done, bytes in all, tensor name). Raises UnsupportedModel for
    an architecture, a rope scaling or a tensor that is not supported, before anything is written.
    """
    config = read_config(reader)
    _refuse_unreadable(reader.tensors)
    tensors = {_hf_name(t.name): t for t in reader.tensors if t.name != "rope_freqs.weight"}
    write_config(config, directory)
    header, total = _header(tensors)
    done = 0
    with (directory / "model.safetensors").open("wb") as file:
        _write_header(file, header)
        for name, tensor in tensors.items():
            data = _values(tensor)
            if config["model_type"] == "llama":
                data = _unpermute(data, name, config)
            file.write(np.ascontiguousarray(data).data)
            done += data.nbytes
            if progress is not None:
                progress(done, total, name)


def write_config(config: dict[str, Any], directory: Path) -> None:
    """Write config.json."""
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the config.json of the model in transformers' terms; raises UnsupportedModel."""
    model_type = _field(reader, "general.architecture")
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"GGUF architecture {model_type} is not supported; supported: {known}"
        )
    names = {tensor.name for tensor in reader.tensors}
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}

    def value(key: str, default: Any = None) -> Any:
        return _field(reader, f"{model_type}.{key}", default)

    _refuse_unbuilt(value)
    heads, hidden = value("attention.head_count"), value("embedding_length")
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": int(shapes["token_embd.weight"][1]),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", hidden // heads),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _decimal(value("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": model_type != "qwen2" and "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": _rope(reader, _decimal(value("rope.freq_base", 10000.0))),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
    }


def _field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _decimal(value: float) -> float:
    """Return the number that was meant: GGUF keeps float32, so 1e-6 comes as 9.99999997e-07."""
    return float(str(np.float32(value)))


def _refuse_unbuilt(value: Callable[..., Any]) -> None:
    if value("expert_count", 0):
        raise UnsupportedModel("mixture-of-experts GGUF models are not supported")
    if value("attention.sliding_window", 0):
        raise UnsupportedModel("sliding window attention is not supported")
    scaling = value("rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModel(f"RoPE scaling of type {scaling} is not supported")
    dim = value("embedding_length") // value("attention.head_count")
    dim = value("attention.key_length", dim)
    if value("rope.dimension_count", dim) != dim:
        raise UnsupportedModel("partial rotary embeddings are not supported")


def _rope(reader: GGUFReader, theta: float) -> dict[str, Any]:
    divisors = next((t.data for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if divisors is None:
        return {"rope_type": "default", "rope_theta": theta}
    factor = _decimal(divisors.max())
    frequencies = theta ** -(np.arange(divisors.size) / divisors.size)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / divisors, kept + (1 - kept) / factor, rtol=1e-3):
        raise UnsupportedModel("the RoPE factors of this GGUF are not Llama 3's")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}


def _hf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INNER:
        return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"
    raise UnsupportedModel(f"GGUF tensor {name} is not part of a supported architecture")


def _header(tensors: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Lay the tensors out one after the other; return the header and the bytes of all."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        # A dequantised value, scale times level plus offset, has more bits than 16-bit floats
        # keep: rounding it here would be a second, silent quantisation.
        dtype = _STORED_AS_IS.get(tensor.tensor_type, "F32")
        start, end = end, end + int(tensor.n_elements) * (4 if dtype == "F32" else 2)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return header, end


def _write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)


def _values(tensor: Any) -> Array:
    """Return the tensor as stored ([out, ...] order): float32, float16 or bfloat16 as uint16."""
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        bits: Array = tensor.data.view(np.uint16)
        return bits
    if tensor.tensor_type in _STORED_AS_IS:
        stored: Array = tensor.data
        return stored
    values: Array = dequantize(tensor.data, tensor.tensor_type)
    return values


def _refuse_unreadable(tensors: list[Any]) -> None:
    for tensor in tensors:
        kind = tensor.tensor_type
        if kind not in _STORED_AS_IS and kind not in _QUANTISED:
            raise UnsupportedModel(f"GGUF tensor {tensor.name} has type {kind.name}")


def _unpermute(data: Array, name: str, config: dict[str, Any]) -> Array:
    """Undo llama.cpp's interleaving of rotary pairs in query and key rows (d, d + D/2 -> 2d)."""
    for key, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{key}." in name:
            pairs = data.reshape(config[heads], config["head_dim"] // 2, 2, -1)
            return pairs.swapaxes(1, 2).reshape(data.shape)
    return data
