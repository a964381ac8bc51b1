"""A conversation by digests: what a client re-sends is known again whatever form it gives it.

Ids, reasoning, white space around an answer, and the form of arguments (spacing, key order, 1.0 for
1) do not count. Everything else does.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from agentserve import wire
from agentserve.dialects.asked import Answered, Asked, Segment

_SIZE = 16


class Chain(msgspec.Struct, frozen=True):
    """The digests of a conversation: after each of its answers, and after all that it feeds."""

    answers: list[bytes]
    end: bytes


def chain(segments: Sequence[Segment], state: bytes = b"") -> Chain:
    """Return the digests of a conversation that goes on from `state`; its end has no answer."""
    answers: list[bytes] = []
    for segment in segments:
        state = after_input(state, segment)
        if segment.answer is not None:
            state = after_answer(state, segment.answer)
            answers.append(state)
    return Chain(answers, state)


def after_input(state: bytes, segment: Segment) -> bytes:
    """Return the digest after what a segment feeds."""
    fed: list[Any] = [["r", index, result.text] for index, result in segment.results]
    fed += [[said.role, said.text] for said in segment.said]
    return _digest(state, fed) if fed else state


def after_answer(state: bytes, answer: Answered) -> bytes:
    """Return the digest after an answer."""
    calls = [[call.name, _arguments(call.arguments)] for call in answer.calls]
    return _digest(state, ["a", answer.text.strip(), calls])


def root(asked: Asked) -> bytes:
    """Return the digest of what a session is created with: system text, tools, options."""
    return profile_digest(asked.system, asked.tools, asked.options)


def profile_digest(
    system: str | None, tools: Iterable[wire.Tool], options: dict[str, Any]
) -> bytes:
    """Return the digest of a session's prompt before its first message."""
    return _digest(b"", [system or "", list(tools), options])


def _digest(state: bytes, value: Any) -> bytes:
    text = msgspec.json.encode(value, order="sorted")
    return hashlib.blake2b(text, key=state, digest_size=_SIZE).digest()


def _arguments(text: str) -> Any:
    try:
        return _plain(msgspec.json.decode(text or "{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return text.strip()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value
