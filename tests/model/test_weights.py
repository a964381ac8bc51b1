import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, load_decoder, run_rows, save_random, shuffled_tables

from agentserve.model.spec import UnsupportedModel, load_spec
from agentserve.model.weights import WeightsError, load_weights, storage_dtype


def tensors_of(directory):
    return load_file(directory / "model.safetensors")


def load(directory):
    return load_weights(directory, load_spec(directory), torch.float32)


def test_every_problem_is_named_in_one_error(tmp_path):
    save_random("llama", tmp_path)
    tensors = tensors_of(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(3, 96)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(144)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight is missing" in message
    assert "k_proj.weight has shape (3, 96), expected (48, 96)" in message
    assert "model.layers.0.self_attn.q_proj.bias is unexpected" in message


def test_old_rope_tables_and_a_repeated_tied_head_are_ignored(tmp_path):
    save_random("qwen2 tied", tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path)
    assert weights.head is weights.embedding


def test_shards_load_as_one_file_does(tmp_path):
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    save_random("qwen3", whole)
    shards.mkdir()
    (shards / "config.json").write_bytes((whole / "config.json").read_bytes())
    tensors = tensors_of(whole)
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(list(tensors.items())[number::3])
        save_file(part, shards / file)
        index |= dict.fromkeys(part, file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    logits = []
    for directory in (whole, shards):
        decoder = load_decoder(directory)
        logits.append(run_rows(decoder, shuffled_tables(decoder, 1), [(0, 0, 9)], range(9)))
    assert torch.equal(*logits)


def test_a_directory_without_weights_says_so(tmp_path):
    save_random("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        load(tmp_path)


def test_an_unsupported_architecture_is_refused_before_the_weights_are_looked_at(tmp_path):
    save_random("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, architectures=["BambaForCausalLM"])
    with pytest.raises(UnsupportedModel, match="BambaForCausalLM"):
        load(tmp_path)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float8"):
        storage_dtype("float8")
