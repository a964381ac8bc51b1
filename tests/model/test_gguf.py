import json

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA3, load_decoder, run_rows, save_random, shuffled_tables

from agentserve.model.decoder import rotary_frequencies
from agentserve.model.gguf import convert, read_config
from agentserve.model.spec import UnsupportedModel, load_spec

QUANTISED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
MATRIX = "blk.0.ffn_up.weight"
NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def permuted(array, heads):
    """llama.cpp's order of rotary rows: (half, pair) becomes (pair, half) in each head."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, directory, *, architecture="llama", kind=Kind.F32, fields=(), extra=()):
    """Write the saved checkpoint as a GGUF whose matrices have type `kind`.

    `fields` are more (key, integer or string); `extra` are (name, data, kind) of tensors that are
    added or take the place of the checkpoint's.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", 24),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (values | dict(fields)).items():
        adders[type(value)](f"{architecture}.{key}", value)
    tensors = dict(checkpoint_tensors(directory, architecture, kind, config))
    tensors |= {name: (data, this) for name, data, this in extra}
    for name, (data, this) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=this)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFReader(path)


def checkpoint_tensors(directory, architecture, kind, config):
    for name, tensor in load_file(directory / "model.safetensors").items():
        array = tensor.numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if architecture == "llama" and part in name:
                array = permuted(array, config[heads])
        this = kind if array.ndim == 2 else Kind.F32
        yield gguf_name(name), (quantize(array, this), this)


def converted(reader, directory, progress=None):
    directory.mkdir()
    convert(reader, directory, progress)
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    save_random("llama", directory, head_dim=32)  # rows of whole 32-value blocks
    return directory


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "llama"),
        ("llama with every bias", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2 tied", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3 tied, with biases", "qwen3"),
    ],
)
def test_float32_tensors_and_config_survive_the_round_trip(tmp_path, family, architecture):
    original = tmp_path / "original"
    save_random(family, original)
    reader = write_gguf(tmp_path / "m.gguf", original, architecture=architecture)
    tensors = converted(reader, tmp_path / "converted")
    expected = load_file(original / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert load_spec(tmp_path / "converted") == load_spec(original)


@pytest.mark.parametrize("kind", [*QUANTISED, Kind.F16, Kind.BF16])
def test_a_converted_model_computes_with_the_dequantised_values(tmp_path, llama, kind):
    reader = write_gguf(tmp_path / "m.gguf", llama, kind=kind)
    tensors = converted(reader, tmp_path / "converted")
    expected = load_file(llama / "model.safetensors")
    for name, tensor in expected.items():
        if tensor.ndim == 2:
            expected[name] = torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
    # Blocks run along a row, so that quantising before or after moving rows is the same.
    assert all(torch.equal(tensors[name].float(), expected[name]) for name in expected)
    stored = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype is stored
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_bytes((llama / "config.json").read_bytes())
    save_file(expected, twin / "model.safetensors")
    logits = []
    for directory in (twin, tmp_path / "converted"):
        decoder = load_decoder(directory)
        logits.append(run_rows(decoder, shuffled_tables(decoder, 1), [(0, 0, 30)], range(30)))
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_are_dequantised(tmp_path, kind):
    """Random blocks in place of one matrix, against the gguf package's own arithmetic by row."""
    save_random("llama", tmp_path, hidden_size=768, num_hidden_layers=1)
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (96, 3 * block_bytes), np.uint8)
    reader = write_gguf(tmp_path / "k.gguf", tmp_path, extra=[(MATRIX, blocks, kind)])
    matrix = converted(reader, tmp_path / "converted")["model.layers.0.mlp.up_proj.weight"]
    assert matrix.dtype is torch.float32
    assert matrix.shape == (96, 768)
    assert matrix.isfinite().all()
    assert matrix.std() > 0
    for row in (0, 50, 95):
        assert np.array_equal(matrix[row].numpy(), dequantize(blocks[row : row + 1], kind)[0])


def test_llama3_rope_factors_become_the_config_that_made_them(tmp_path):
    scaling = dict(LLAMA3, original_max_position_embeddings=8192)
    original = tmp_path / "original"
    save_random("llama", original, rope_parameters=scaling, head_dim=32, hidden_size=192)
    spec = load_spec(original)
    plain = msgspec.structs.replace(spec, rope_scaling=None)
    divisors = (rotary_frequencies(plain) / rotary_frequencies(spec)).numpy()
    assert divisors.min() == 1
    assert divisors.max() == 8
    extra = [("rope_freqs.weight", divisors, Kind.F32)]
    converted(write_gguf(tmp_path / "m.gguf", original, extra=extra), tmp_path / "converted")
    assert load_spec(tmp_path / "converted") == spec
    extra = [("rope_freqs.weight", np.linspace(1, 8, 16, dtype=np.float32), Kind.F32)]
    with pytest.raises(UnsupportedModel, match="not Llama 3's"):
        read_config(write_gguf(tmp_path / "odd.gguf", original, extra=extra))


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("gemma2", {}, "gemma2"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"rope.scaling.type": "yarn"}, "yarn"),
        ("llama", {"rope.dimension_count": 12}, "partial rotary"),
        ("llama", {"attention.sliding_window": 64}, "sliding window"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, llama, architecture, fields, named):
    reader = write_gguf(tmp_path / "m.gguf", llama, architecture=architecture, fields=fields)
    (tmp_path / "converted").mkdir()
    with pytest.raises(UnsupportedModel, match=named):
        convert(reader, tmp_path / "converted")
    assert not list((tmp_path / "converted").iterdir())


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("blk.0.attn_sinks.weight", np.zeros(8, np.float32), Kind.F32),
        (MATRIX, np.zeros((96, 3 * 40), np.uint8), Kind.Q8_1),
    ],
)
def test_a_tensor_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path, llama, name, data, kind
):
    extra = [(name, data, kind)]
    reader = write_gguf(tmp_path / "m.gguf", llama, extra=extra)
    (tmp_path / "converted").mkdir()
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        convert(reader, tmp_path / "converted")
    assert not list((tmp_path / "converted").iterdir())


def test_progress_counts_the_bytes_up_to_all(tmp_path, llama):
    calls = []
    reader = write_gguf(tmp_path / "m.gguf", llama)
    converted(reader, tmp_path / "converted", lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == calls[-1][1]
    assert {total for _, total, _ in calls} == {done[-1]}
    assert len(calls) == len(reader.tensors)
