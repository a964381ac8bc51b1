"""A script: what the model says next, for tests of agents without a model.

A JSON file `{"context": 65536, "answers": [...]}`, a JSON list of answers, or one answer a line.
An answer is `{"text": ...}`, `{"output": [items]}` or `{"raw": ...}`, and may say when it is due.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentserve import wire
from agentserve.engine.plan import pack
from agentserve.errors import InvalidRequest
from agentserve.sessions.text import ModelText

MAX_CONTEXT = 1 << 20


class ScriptError(ValueError):
    """The file is not a script; the message says which answer is wrong and why."""


class ScriptAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer of the model: exactly one of `text`, `output` and `raw`.

    It is due when `when` is part of what the turn feeds (the user's message or the tool results)
    and `system` part of the system text. Without `repeat` it is given once. `raw` is what the model
    generates, in its own format; the others are written in that format.
    """

    text: str | None = None
    output: list[wire.Text | wire.Reasoning | wire.ToolCall] | None = None
    raw: str | None = None
    when: str = ""
    system: str = ""
    repeat: bool = False


class ScriptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole script; `context` is the model's, in tokens (the real one's when left out)."""

    answers: list[ScriptAnswer]
    context: int | None = None


def read_script(path: Path) -> ScriptFile:
    """Return the script in a .json or .jsonl file. Raises ScriptError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}") from None
    try:
        script = _parse(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScriptError(f"{path}: {error}") from None
    if not script.answers:
        raise ScriptError(f"{path}: the script has no answers")
    if script.context is not None and not 64 <= script.context <= MAX_CONTEXT:
        raise ScriptError(f"{path}: context is from 64 to {MAX_CONTEXT} tokens")
    for number, answer in enumerate(script.answers, start=1):
        if sum(part is not None for part in (answer.text, answer.output, answer.raw)) != 1:
            raise ScriptError(
                f"{path}: answer {number} needs exactly one of `text`, `output` and `raw`"
            )
    return script


def _parse(data: bytes) -> ScriptFile:
    try:
        whole = msgspec.json.decode(data)
    except msgspec.DecodeError:
        lines = [line for line in data.splitlines() if line.strip()]
        whole = [_line(line, number) for number, line in enumerate(lines, start=1)]
    if isinstance(whole, dict) and "answers" not in whole:
        whole = [whole]
    if isinstance(whole, list):
        whole = {"answers": whole}
    return msgspec.convert(whole, ScriptFile)


def _line(line: bytes, number: int) -> object:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(f"line {number}: {error}") from None


class Script:
    """The answers that are still to be given, in the tokens of one model.

    Raises ScriptError when the model has no form for a part of an answer.
    """

    def __init__(self, file: ScriptFile, text: ModelText) -> None:
        self._text = text
        self._answers = list(file.answers)
        for number, answer in enumerate(self._answers, start=1):
            self._require_form(answer, number)

    def next(self, system: str, fed: str, *, in_reasoning: bool) -> bytes:
        """Return the ids of the next answer that is due, packed, with a stop token at the end.

        fed: what the turn feeds; in_reasoning: the prompt has opened the reasoning already. Raises
        InvalidRequest when no answer is due.
        """
        for index, answer in enumerate(self._answers):
            if answer.when in fed and answer.system in system:
                if not answer.repeat:
                    del self._answers[index]
                tokenizer = self._text.tokenizer
                ids = self._ids(answer, in_reasoning)
                return pack([*ids, tokenizer.stop_ids[0]])
        raise InvalidRequest(
            f"the script has no answer to this turn ({len(self._answers)} are left, for others)",
            param="input",
        )

    def _ids(self, answer: ScriptAnswer, in_reasoning: bool) -> list[int]:
        tokenizer = self._text.tokenizer
        if answer.raw is not None:
            return tokenizer.encode_render(answer.raw, "", "continuation")
        parts = [wire.Text(answer.text)] if answer.text is not None else answer.output or []
        return tokenizer.encode_text(self._written(parts, in_reasoning))

    def _written(
        self, parts: Sequence[wire.Text | wire.Reasoning | wire.ToolCall], in_reasoning: bool
    ) -> str:
        opening, closing = self._text.format.reasoning or ("", "")
        thoughts = [part.text for part in parts if isinstance(part, wire.Reasoning)]
        rest = [part for part in parts if not isinstance(part, wire.Reasoning)]
        text = self._text.format.emit(rest)
        if not thoughts:
            return text
        start = "" if in_reasoning else f"{opening}\n"
        return f"{start}{''.join(thoughts)}\n{closing}\n\n{text}"

    def _require_form(self, answer: ScriptAnswer, number: int) -> None:
        thinks = any(isinstance(part, wire.Reasoning) for part in answer.output or [])
        if thinks and self._text.format.reasoning is None:
            raise ScriptError(
                f"answer {number} has reasoning, for which {self._text.name} has no form"
            )
