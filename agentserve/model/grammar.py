"""Token masks from structural tags, by xgrammar; compiled in a process of its own."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from agentserve.config import GRAMMAR_BYTES, GRAMMAR_CPU_S
from agentserve.engine.compiler import CompilerProcess
from agentserve.engine.jobs import Setup
from agentserve.spoken import SPOKEN


def grammar_compiler(
    directory: Path | str,
    vocab_size: int,
    memory: int = GRAMMAR_BYTES,
    cpu_s: float = GRAMMAR_CPU_S,
) -> CompilerProcess:
    """Return a compiler of structural tags (JSON) for the tokenizer in `directory`.

    `vocab_size` is the model's: logits may be wider than the vocabulary, and the ids beyond it are
    never allowed. Its process takes at most `memory` bytes, and `cpu_s` seconds of processor time
    for each.
    """
    info = _tokenizer_info(Path(directory), vocab_size)
    return CompilerProcess(
        ["-m", "agentserve.model.grammar_worker"],
        lambda: Setup(info.serialize_json(), memory, cpu_s),
        lambda data: XGrammar(xgrammar.CompiledGrammar.deserialize_json(data, info), vocab_size),
    )


class XGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self.size = int(compiled.memory_size_bytes)

    def matcher(self) -> "XGrammarMatcher":
        """Return the state of a new constrained turn."""
        return XGrammarMatcher(self._compiled, self._vocab_size)


class XGrammarMatcher:
    """The state of one constrained turn, made when it is first needed or at `prepare`."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size

    @functools.cached_property
    def _matcher(self) -> Any:
        return xgrammar.GrammarMatcher(self._compiled)

    @functools.cached_property
    def _mask(self) -> NDArray[np.int32]:
        return np.zeros((1, (self._vocab_size + 31) // 32), dtype=np.int32)

    def prepare(self) -> None:
        """Make the state."""
        _ = self._matcher

    def mask(self) -> bytes | None:
        """Return which tokens may come next: bit i of little-endian int32 word w is 32*w + i.

        None when any may. When the output is complete only stop tokens may.
        """
        if self._matcher.is_terminated():
            return None
        if not self._matcher.fill_next_token_bitmask(self._mask):
            return None
        if rest := self._vocab_size % 32:  # xgrammar leaves the bits past the vocabulary set
            self._mask[0, -1] &= (1 << rest) - 1
        return self._mask.tobytes()

    @property
    def complete(self) -> bool:
        """Whether the output can end here."""
        return bool(self._matcher.is_completed())

    @property
    def broken(self) -> bool:
        """Whether a token did not fit, which ended the constraint."""
        return isinstance(self._matcher, _Free)

    def accept(self, token: int) -> None:
        """Advance by `token`. A forced token that does not fit ends the constraint."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            self._matcher = _Free()


class _Free:
    """What is left of a constraint that a forced token broke: none."""

    def is_terminated(self) -> bool:
        """Return that nothing follows."""
        return True

    is_completed = is_terminated


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
