import json

import pytest
import text_models
from transformers import AutoTokenizer

from agentserve.model.gguf_tokenizer import write_tokenizer

TEXTS = [
    "hello world",
    "12345 67 0x1F 3.14159 1,000,000",
    "def f(x):\n\treturn [i ** 2 for i in range(10)]  # ok\n\n\n",
    "日本語 émoji 😀 naïve Ελληνικά \u200b\ufeff",
    "a   b\n\n\n c\t\t\r\n   ",
    " it's I'll they've DON'T",
    "<|im_start|>user\nhi<|im_end|>\n",
    '{"name": "grep", "arguments": {"pattern": "^a+$"}}',
]


@pytest.fixture(scope="module")
def converted_by_transformers():
    path = text_models.smollm_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_ids_equal_the_conversion_that_transformers_makes(converted_by_transformers):
    ours = text_models.reference("smollm2")
    for text in TEXTS:
        theirs = converted_by_transformers.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == theirs, text
        assert ours.decode(theirs) == text


def test_configuration_names_the_special_tokens_and_the_ends_of_a_turn():
    directory = text_models.smollm()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    generation = json.loads((directory / "generation_config.json").read_text())
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == config["pad_token"] == "<|im_end|>"
    assert "<|im_start|>" in config["chat_template"]
    assert generation["eos_token_id"] == [2]


def test_a_sentencepiece_vocabulary_gives_the_ids_that_sentencepiece_gives():
    model, ours = text_models.sentencepiece_model(), text_models.reference("sentencepiece")
    for text in ["the cat sat", "  two  spaces ", "naïve 😀 x", "def main():\n    return 3\n", "a"]:
        assert ours.encode(text, add_special_tokens=False) == model.encode(text)


@pytest.mark.parametrize("name", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_each_byte_level_pre_tokenizer_gives_back_the_text(name, tmp_path):
    alphabet = list(text_models._alphabet().values())
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": name,
        "ggml.tokens": [*alphabet, "Ġa", "12", "<|end|>"],
        "ggml.token_type": [1] * 258 + [3],
        "ggml.merges": ["Ġ a", "1 2"],
        "ggml.eos_token_id": 258,
    }
    write_tokenizer(text_models.Reader(**fields), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("it's a 12345\n", add_special_tokens=False)
    assert tokenizer.decode(ids) == "it's a 12345\n"
    assert (257 in ids) == (name in ("default", "gpt-2", "llama-bpe"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ggml.model": "bert", "ggml.tokens": ["a"]}, "kind 'bert'"),
        ({"ggml.model": "gpt2", "ggml.tokens": ["a"], "ggml.pre": "mystery"}, "'mystery'"),
        ({"ggml.model": "gpt2"}, "no vocabulary"),
        ({"ggml.model": "llama", "ggml.tokens": ["a"]}, "without scores"),
    ],
)
def test_an_unsupported_tokenizer_is_refused_by_name(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_tokenizer(text_models.Reader(**fields), tmp_path)
