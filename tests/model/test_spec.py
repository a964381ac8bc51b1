import json

import pytest
from tiny_models import FAMILIES, save_random

from agentserve.model.spec import UnsupportedModel, load_spec, parse_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def parse(**changes):
    return parse_spec(json.dumps(LLAMA | changes).encode())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_saved_by_transformers_is_read(tmp_path, family):
    config = save_random(family, tmp_path).config
    spec = load_spec(tmp_path)
    assert (spec.heads, spec.kv_heads) == (6, config.num_key_value_heads)
    assert spec.max_context == 512
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert (spec.rope_scaling is not None) == ("scaled" in family)
    assert spec.head_norm == family.startswith("qwen3")
    assert spec.qkv_bias == ("bias" in family or family.startswith("qwen2"))
    assert spec.output_bias == ("bias" in family)


def test_absent_keys_take_the_defaults_of_transformers():
    spec = parse()
    assert (spec.kv_heads, spec.head_dim, spec.rope_theta) == (4, 16, 10000.0)
    assert not spec.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM"),
        ({"architectures": None}, "none given"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding window"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "sliding_attention",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        parse(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 256},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False},
    ],
)
def test_a_window_that_never_cuts_is_accepted(changes):
    assert parse(**changes).layers == 2


def test_an_unknown_architecture_is_refused_whatever_else_its_config_lacks():
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        parse_spec(b'{"architectures": ["MambaForCausalLM"]}')


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"not json", "config.json"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "vocab_size"),
        (json.dumps(LLAMA | {"rope_scaling": {"rope_type": "llama3"}}).encode(), "factor"),
    ],
)
def test_a_malformed_config_says_what_is_wrong(data, named):
    with pytest.raises(ValueError, match=named):
        parse_spec(data)
