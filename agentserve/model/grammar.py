"""Token masks from structural tags: xgrammar behind the engine's GrammarFactory interface."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar

from agentserve.spoken import SPOKEN

_CACHE_BYTES = 256 * 1024 * 1024
_MAX_SPEC = 1024 * 1024  # characters


class XGrammarFactory:
    """Compiles specs for the tokenizer in `directory`.

    `vocab_size` is the model's: logits may be wider than the vocabulary, and the ids beyond it are
    never allowed.
    """

    def __init__(self, directory: Path | str, vocab_size: int) -> None:
        info = _tokenizer_info(Path(directory), vocab_size)
        self._vocab_size = vocab_size
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=2, cache_limit_bytes=_CACHE_BYTES
        )

    def compile(self, spec: str) -> "XGrammarMatcher":
        """Return a matcher for a structural tag (JSON).

        Raises ValueError with xgrammar's reason when it cannot be compiled.
        """
        if len(spec) > _MAX_SPEC:
            raise ValueError(f"the grammar is longer than {_MAX_SPEC} characters")
        try:
            compiled = self._compiler.compile_structural_tag(spec)
            return XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._vocab_size)
        except Exception as error:  # a C++ library: its errors have no common base
            raise ValueError(f"the grammar cannot be compiled: {_reason(error)}") from None


class XGrammarMatcher:
    """The state of one constrained turn."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        words = (vocab_size + 31) // 32
        self._mask = np.zeros((1, words), dtype=np.int32)
        self._last = np.uint32((1 << (vocab_size - 32 * (words - 1))) - 1).astype(np.int32)

    def mask(self) -> bytes | None:
        """Return which tokens may come next: bit i of little-endian int32 word w is 32*w + i.

        None when any may. When the output is complete only stop tokens may.
        """
        if self._matcher.is_terminated():
            return None
        if not self._matcher.fill_next_token_bitmask(self._mask):
            return None
        self._mask[0, -1] &= self._last  # xgrammar leaves the bits past the vocabulary set
        return self._mask.tobytes()

    def accept(self, token: int) -> None:
        """Advance by `token`. A forced token that does not fit ends the constraint."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            self._matcher = _Free()


class _Free:
    """What is left of a constraint that a forced token broke: none."""

    def is_terminated(self) -> bool:
        """Return that nothing follows."""
        return True


def _reason(error: Exception) -> str:
    """Return the first line of what went wrong, without the place in xgrammar's source."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[0-9:]+\] \S+: ", "", first[:500])


def _tokenizer_info(directory: Path, vocab_size: int) -> xgrammar.TokenizerInfo:
    """Read tokenizer.json; special tokens get no text, so that no grammar allows them."""
    pipeline = json.loads((directory / "tokenizer.json").read_bytes())
    vocabulary = pipeline["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
    encoded = [""] * vocab_size
    for piece, token in vocabulary.items():
        if token < vocab_size:
            encoded[token] = piece
    for added in pipeline.get("added_tokens") or []:
        if added["id"] < vocab_size:
            hidden = added.get("special") and added["content"] not in SPOKEN
            encoded[added["id"]] = "" if hidden else added["content"]
    byte_level = "ByteLevel" in json.dumps(pipeline.get("decoder"))
    kind = xgrammar.VocabType.BYTE_LEVEL if byte_level else xgrammar.VocabType.BYTE_FALLBACK
    stops = _stop_ids(directory, pipeline)
    return xgrammar.TokenizerInfo(encoded, kind, vocab_size=vocab_size, stop_token_ids=stops)


def _stop_ids(directory: Path, pipeline: dict[str, Any]) -> list[int]:
    """Return every id that ends a turn."""
    ends = _read(directory / "generation_config.json").get("eos_token_id") or []
    stops = {ends} if isinstance(ends, int) else set(ends)
    eos = _read(directory / "tokenizer_config.json").get("eos_token")
    eos = eos["content"] if isinstance(eos, dict) else eos
    added = pipeline.get("added_tokens") or []
    stops |= {token["id"] for token in added if token["content"] == eos}
    if not stops:
        raise ValueError(f"{directory} names no token that ends a turn")
    return sorted(stops)


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return value
