"""Text to token ids and back, where text can never become a control token.

An *added token* (in the tokenizer's sense) that consists of two or more characters, not all of
them white space, is structure: only the chat template may write it. `encode_text` is the model's
own tokenizer with those tokens taken out; `encode_render` puts them back where a rendered template
has them unbroken.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import tokenizers

from agentserve.spoken import SPOKEN

# White space as the tokenizers library (Rust) sees it; Python's str.strip takes more.
_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)

# What templates write around messages is short, and the same again and again.
_SHORT = 32  # characters
_KEPT_SHORT = 4096

Place = Literal["start", "segment", "continuation"]


class Control(msgspec.Struct, frozen=True):
    """A structure token; `lstrip` and `rstrip` say that it swallows the white space beside it."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """A model's vocabulary: tokenizer.json with its configuration.

    `control_ids` are the structure tokens, `stop_ids` end a turn, `special` maps bos_token,
    eos_token, ... to their text, and `vocab_size` counts ids, the highest plus one.
    """

    def __init__(
        self, pipeline: dict[str, Any], config: dict[str, Any], stop_ids: Iterable[int] = ()
    ) -> None:
        added = pipeline.get("added_tokens") or []
        vocabulary = _vocabulary(pipeline["model"])
        controls = [_control(token) for token in added if _is_structure(token)]
        self._controls = {control.text: control for control in controls}
        self._control_texts = {control.id: control.text for control in controls}
        self.controls = tuple(self._controls)
        self.control_ids = frozenset(control.id for control in controls)
        self._splitter = _any_of(self.controls)
        self._bytes, self.drops_first_space = _token_bytes(pipeline, vocabulary)
        self._encoders = _encoders(pipeline, vocabulary)
        self._short: dict[tuple[str, Place], tuple[int, ...]] = {}  # what was encoded
        self.vocab_size = len(self._bytes)
        self.longest_token = max(map(len, self._bytes))  # bytes
        self.special = _special_texts(config)
        self.chat_template = _chat_template(config)
        self.stop_ids = tuple(sorted({*stop_ids, *self._ids_of("eos_token")}))

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read the tokenizer files of a prepared model.

        Raises ValueError when tokenizer.json is missing or of a kind that is not supported.
        """
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{directory} has no tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.exists():
            config["chat_template"] = template.read_text(encoding="utf-8")
        ends = _read_json(directory / "generation_config.json").get("eos_token_id") or []
        return cls(_read_json(path), config, [ends] if isinstance(ends, int) else ends)

    def encode_text(self, text: str, place: Place = "continuation") -> list[int]:
        """Return the ids of `text` as data: never a control id, whatever the text says.

        `place` says what stands before it: nothing ("start"), a control token ("segment") or
        other text ("continuation"); only SentencePiece-type vocabularies tell them apart.
        """
        if len(text) > _SHORT:
            return self._encode(text, place)
        known = self._short.get((text, place))
        if known is None:
            if len(self._short) >= _KEPT_SHORT:
                self._short.clear()
            known = self._short[text, place] = tuple(self._encode(text, place)) if text else ()
        return list(known)

    def _encode(self, text: str, place: Place) -> list[int]:
        encoding = self._encoders[place].encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # A Unigram vocabulary can match a control piece as text: cut inside it and try again.
        at = next(i for i, token in enumerate(ids) if token in self.control_ids)
        begin, end = encoding.offsets[at]
        middle = min(max((begin + end) // 2, 1), len(text) - 1)
        return [*self.encode_text(text[:middle], place), *self.encode_text(text[middle:])]

    def encode_render(self, text: str, mark: str, place: Place = "start") -> list[int]:
        """Return the ids of rendered template text.

        Unbroken control strings become their ids; `mark`, which breaks the others, is removed.
        """
        ids: list[int] = []
        parts = self._splitter.split(text)
        before: Control | None = None
        for i in range(0, len(parts), 2):
            after = self._controls[parts[i + 1]] if i + 1 < len(parts) else None
            piece = parts[i].replace(mark, "")
            if before is not None:
                place = "segment"
                piece = piece.lstrip(_SPACE) if before.rstrip else piece
            if after is not None and after.lstrip:
                piece = piece.rstrip(_SPACE)
            ids += self.encode_text(piece, place)
            if after is not None:
                ids.append(after.id)
            before = after
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens and unknown ids have none.

        Bytes that are not UTF-8 become U+FFFD.
        """
        stream = Detokenizer(self)
        return stream.push(ids) + stream.flush()

    def control_text(self, token: int) -> str:
        """Return the text of a structure token, "" for any other id."""
        return self._control_texts.get(token, "")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` adds to the text."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def _ids_of(self, name: str) -> list[int]:
        control = self._controls.get(self.special.get(name, ""))
        return [] if control is None else [control.id]


class Detokenizer:
    """Turns a stream of ids into text without ever splitting a character.

    The concatenation of all `push` results and of `flush` equals `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is complete with `ids`."""
        return self._trim(self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids))))

    def flush(self) -> str:
        """Return what is left: U+FFFD for a character that was never completed."""
        return self._trim(self._decoder.decode(b"", final=True))

    @property
    def pending(self) -> bool:
        """Whether the last id ended inside a character."""
        return bool(self._decoder.getstate()[0])

    def _trim(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")  # noqa: TRY004 - bad data
    return value


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return vocabulary
    if isinstance(vocabulary, list):
        return {piece: i for i, (piece, _) in enumerate(vocabulary)}
    raise ValueError(f"tokenizer.json has a model of kind {model.get('type')!r} without vocabulary")


def _is_structure(token: dict[str, Any]) -> bool:
    # Some vocabularies have added tokens for runs of white space: those are text.
    text: str = token["content"]
    return len(text) > 1 and not text.isspace()


def _control(token: dict[str, Any]) -> Control:
    return Control(
        token["id"],
        token["content"],
        bool(token.get("special")),
        bool(token.get("lstrip")),
        bool(token.get("rstrip")),
    )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern with one group that matches the longest of `texts`."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")


def _encoders(
    pipeline: dict[str, Any], vocabulary: dict[str, int]
) -> dict[Place, tokenizers.Tokenizer]:
    """Return the tokenizer without its structure tokens, for each place that text can stand in."""
    kept = [
        token
        for token in pipeline.get("added_tokens") or []
        if not _is_structure(token) and vocabulary.get(token["content"]) == token["id"]
    ]
    start = {**pipeline, "added_tokens": kept, "post_processor": None}
    segment = {**start, "pre_tokenizer": _without_prefix(start.get("pre_tokenizer"), {"first"})}
    continuation = {
        **start,
        "normalizer": _without_prepend(start.get("normalizer")),
        "pre_tokenizer": _without_prefix(start.get("pre_tokenizer"), {"first", "always"}),
    }
    first = _build(start)
    other = first if segment == start else _build(segment)
    last = other if continuation == segment else _build(continuation)
    return {"start": first, "segment": other, "continuation": last}


def _build(pipeline: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(pipeline))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer.json cannot be used: {error}") from None


def _without_prefix(step: Any, schemes: set[str]) -> Any:
    """Return a pre-tokenizer that adds no space where those prepend schemes would."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Sequence":
        return {
            **step,
            "pretokenizers": [_without_prefix(s, schemes) for s in step["pretokenizers"]],
        }
    if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") in schemes:
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel" and step.get("add_prefix_space") and "always" in schemes:
        return {**step, "add_prefix_space": False}
    return step


def _without_prepend(step: Any) -> Any:
    """Return a normaliser that prepends nothing."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    if step["type"] == "Sequence":
        return {**step, "normalizers": [_without_prepend(s) for s in step["normalizers"]]}
    return step


def _token_bytes(pipeline: dict[str, Any], vocabulary: dict[str, int]) -> tuple[list[bytes], bool]:
    """Return the bytes of each id, and whether decoding drops a leading space."""
    added = pipeline.get("added_tokens") or []
    size = 1 + max((*vocabulary.values(), *(token["id"] for token in added)), default=-1)
    steps = _steps(pipeline.get("decoder"))
    kinds = {step["type"] for step in steps}
    table = [b""] * size
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        for piece, i in vocabulary.items():
            table[i] = bytes(alphabet[c] for c in piece if c in alphabet)
    elif kinds & {"ByteFallback", "Metaspace"}:
        for piece, i in vocabulary.items():
            table[i] = _piece_bytes(piece)
    else:
        raise ValueError(
            f"tokenizer.json has a decoder of kind {sorted(kinds)}; "
            "known: byte-level and SentencePiece"
        )
    for token in added:
        hidden = token.get("special") and token["content"] not in SPOKEN
        table[token["id"]] = b"" if hidden else token["content"].encode()
    return table, any(map(_drops_space, steps))


def _drops_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return step["type"] == "Strip" and bool(step.get("start"))


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder["type"] == "Sequence":
        return [inner for step in decoder["decoders"] for inner in _steps(step)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte, as character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return alphabet


def _piece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _special_texts(config: dict[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
    texts = {name: config.get(name) for name in (*names, "mask_token")}
    plain = {k: v["content"] if isinstance(v, dict) else v for k, v in texts.items()}
    return {name: text for name, text in plain.items() if isinstance(text, str)}


def _chat_template(config: dict[str, Any]) -> str:
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("default", ""))
    return str(template)
