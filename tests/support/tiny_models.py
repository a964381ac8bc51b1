"""Random tiny checkpoints of every supported family, and a bare driver of the decoder."""

import dataclasses
import json

import numpy as np
import torch
import transformers

from agentserve.engine.plan import Row
from agentserve.model.batch import build_step
from agentserve.model.decoder import Decoder, empty_cache
from agentserve.model.spec import load_spec
from agentserve.model.weights import load_weights

SIZES = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama tied, rope scaled": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama with every bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without grouping": ("Llama", {"num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"hidden_size": 144}),
    "qwen2 tied": ("Qwen2", {"hidden_size": 144, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3 tied, with biases": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


def save_random(family, directory, seed=0, **overrides):
    """Save a random checkpoint of FAMILIES; return transformers' own model of it."""
    name, changes = FAMILIES[family]
    sizes = SIZES | changes | overrides
    if name == "Qwen2":
        del sizes["head_dim"]  # hidden_size / heads, as in its config class
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # The default init gives flat logits and zero biases, which would hide mistakes; a much
            # larger one amplifies float32's own rounding from layer to layer.
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    return model


def load_decoder(directory, *, dtype=torch.float32, block_size=16, num_blocks=64):
    """Return the native decoder of a saved checkpoint."""
    spec = load_spec(directory)
    cache = empty_cache(spec, num_blocks, block_size, dtype)
    return Decoder(spec, load_weights(directory, spec, dtype), cache)


def run_rows(decoder, tables, rows, tokens):
    """Run one step of (slot, start, count) rows; return the logits of all its tokens."""
    plan = [Row(slot, start, count, sample=True) for slot, start, count in rows]
    step = build_step(plan, np.asarray(tokens, np.int32), tables, decoder.cache.shape[4])
    everything = torch.arange(step.tokens.shape[0])
    return decoder.forward(dataclasses.replace(step, sampled=everything)).clone()


def shuffled_tables(decoder, slots):
    """Deal the cache's blocks to `slots` tables in a random order."""
    order = torch.randperm(decoder.cache.shape[0], generator=torch.Generator().manual_seed(3))
    return order[: len(order) // slots * slots].view(slots, -1).int()


def edit_config(directory, **changes):
    """Change keys of the saved config.json; None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))
