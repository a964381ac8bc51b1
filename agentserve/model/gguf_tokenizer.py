"""Tokenizer files of a GGUF model: tokenizer.json, tokenizer_config.json, generation_config.json.

GGUF stores the vocabulary, the merges and the *name* of the pre-tokenizer; the pipeline that the
name stands for is written down here. Imports no torch.
"""

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE


class GGUFMetadata(Protocol):
    """The part of `gguf.GGUFReader` that is read here."""

    fields: dict[str, Any]


# Token types of the GGUF specification.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# The word-splitting patterns that these models were trained with.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(reader: GGUFMetadata, directory: Path) -> None:
    """Write the tokenizer files of the model behind `reader` (a `gguf.GGUFReader`).

    Raises ValueError, naming the kind, when the tokenizer is of a kind that is not supported.
    """
    meta = _Metadata(reader)
    kind = meta.get("ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(meta)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta)
    else:
        raise ValueError(f"the GGUF file has a tokenizer of kind {kind!r}; known: gpt2, llama")
    tokenizer.add_tokens(_added_tokens(meta))
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(meta))
    _write_json(directory / "generation_config.json", _generation_config(meta))


class _Metadata:
    """The fields under `tokenizer.`, and the vocabulary."""

    def __init__(self, reader: GGUFMetadata) -> None:
        self._fields = reader.fields
        self.tokens: list[str] = self.get("ggml.tokens") or []
        if not self.tokens:
            raise ValueError("the GGUF file has no vocabulary")
        self.types: list[int] = self.get("ggml.token_type") or [NORMAL] * len(self.tokens)

    def get(self, key: str) -> Any:
        """Return the value of `tokenizer.<key>`, or None."""
        field = self._fields.get("tokenizer." + key)
        return None if field is None else field.contents()

    def special(self, name: str) -> str | None:
        """Return the text of the bos, eos, unknown or padding token, or None."""
        token_id = self.get(f"ggml.{name}_token_id")
        if token_id is None or not 0 <= token_id < len(self.tokens):
            return None
        token: str = self.tokens[token_id]
        return token


def _byte_level(meta: _Metadata) -> Tokenizer:
    """Byte-level BPE (GPT-2), with the pre-tokenizer that `tokenizer.ggml.pre` names."""
    name = meta.get("ggml.pre") or "default"
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(meta.tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    if name in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif name == "llama-bpe":
        tokenizer.pre_tokenizer = _split_by(_LLAMA3)
    elif name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _split_by(_QWEN2)
    else:
        raise ValueError(
            f"the GGUF file has the pre-tokenizer {name!r}; known: default, gpt-2, smollm, "
            "llama-bpe, qwen2"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(meta: _Metadata) -> Tokenizer:
    """SentencePiece BPE with byte fallback (Llama 2, Mistral)."""
    vocabulary = {token: i for i, token in enumerate(meta.tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges_by_score(meta, vocabulary),
            unk_token=meta.special("unknown"),
            fuse_unk=True,
            byte_fallback=BYTE in meta.types,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("ggml.add_space_prefix") is not False:
        # Text gets the prefix at its start and after every control token.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(meta: _Metadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Recover the merges, which SentencePiece does not store: best score of the result first."""
    scores = meta.get("ggml.scores")
    if scores is None:
        raise ValueError("the GGUF file has a SentencePiece vocabulary without scores")
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(meta.tokens, meta.types, scores, strict=True):
        if kind != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _added_tokens(meta: _Metadata) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(meta.tokens, meta.types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _tokenizer_config(meta: _Metadata) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": meta.special("bos"),
        "eos_token": meta.special("eos"),
        "unk_token": meta.special("unknown"),
        "pad_token": meta.special("padding"),
        "chat_template": meta.get("chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(meta: _Metadata) -> dict[str, Any]:
    """Every id that ends a turn, besides bos and pad for the tools that want them."""
    ends = [meta.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config = {
        "eos_token_id": sorted({end for end in ends if end is not None}),
        "bos_token_id": meta.get("ggml.bos_token_id"),
        "pad_token_id": meta.get("ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
