"""`agentserve doctor --families`: what each family's chat template does to an agent's history.

The model's own template is looked at, and those that a development package brings (TRL). Each is
tried on a tool loop of generated messages and on one whose calls the template writes.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentserve import wire
from agentserve.assembly import load_text
from agentserve.engine.plan import pack
from agentserve.errors import AgentserveError
from agentserve.model.prepare import Progress, prepare
from agentserve.sessions.conversation import Call, Conversation, Message
from agentserve.sessions.output import OutputStream
from agentserve.sessions.text import ModelText, model_text
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import FORMATS, choose
from agentserve.spoken import SPOKEN

LOOP = 10  # tool calls in the loop that is tried
_TOOL = wire.Tool(
    "look",
    {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}},
    "Look at a file.",
)
_CALLS = (
    ("look", {"path": "src/a.py", "limit": 3}),
    ("look", {"path": "b", "limit": 0}),
)
_CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|\[/?[A-Z_]{3,20}\]")
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>", "</s>", "<|end|>")
_MORE_ENDS = ("<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>", "[e~[", "<|endoftext|>")

_RAW = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What one template does. `recomputed_*`: the share of a loop's log that is computed again.

    `on_result`, `on_user`: whether a tool result, or a user message, only adds to the log;
    `round_trip`: whether calls that the template writes are read as the same calls. None: untried.
    """

    format: str
    template: str
    tested: bool
    refused: str = ""
    on_result: bool | None = None
    on_user: bool | None = None
    recomputed_on_result: float | None = None
    recomputed_on_user: float | None = None
    calls_per_message: str = ""
    results_name: str = ""
    survives: list[str] = []
    round_trip: bool | None = None


def examine_model(model: str, progress: Progress | None = None) -> Family:
    """Return what the template of `model` (anything that `serve` takes) does."""
    directory = prepare(model, progress)
    return examine(load_text(directory, model), f"model {model}")


def examine_families(own: Family | None) -> list[Family]:
    """Return `own`, then what the installed templates do, then the families that none is of."""
    found = [] if own is None else [own]
    for name, source in installed_templates():
        text_format = choose("auto", source)
        if text_format.native:
            found.append(examine_source(source, name))
    seen = {family.format for family in found}
    found += [
        Family(format=name, template="", tested=False)
        for name in sorted(FORMATS)
        if name not in seen
    ]
    return found


def installed_templates() -> Iterator[tuple[str, str]]:
    """Yield (name, source) of the chat templates in installed packages."""
    spec = importlib.util.find_spec("trl")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted((Path(folder) / "chat_templates").glob("*.jinja")):
            if not path.stem.endswith("_training"):
                yield f"trl {path.stem}", path.read_text(encoding="utf-8")


def examine_source(source: str, name: str) -> Family:
    """Return what a template does that comes without a tokenizer: one is made of its controls."""
    format = choose("auto", source)
    try:
        return examine(model_text(name, byte_tokenizer(source), format), name)
    except ValueError as error:
        return Family(format=format.name, template=name, tested=False, refused=str(error))


def examine(text: ModelText, name: str) -> Family:
    """Return what the template of `text` does."""
    survival = text.composer.survival
    kinds = {
        "system": survival.system,
        "system inside": survival.system_inside,
        "calls": survival.calls or not text.format.native,
        "reasoning": survival.reasoning,
        "results": survival.results,
    }
    found = Family(
        format=text.format.name,
        template=name,
        tested=True,
        calls_per_message="1" if text.format.one_call else "many",
        results_name=survival.names_results or "no, a label is added",
        survives=[kind for kind, survives in kinds.items() if survives],
    )
    try:
        after_result, after_user = _loop(text)
        found = msgspec.structs.replace(
            found,
            on_result=after_result == 0,
            on_user=after_user == 0,
            recomputed_on_result=round(after_result, 3),
            recomputed_on_user=round(after_user, 3),
            round_trip=_round_trip(text),
        )
    except AgentserveError as error:
        return msgspec.structs.replace(found, refused=error.message)
    return found


def byte_tokenizer(template: str) -> Tokenizer:
    """Return a tokenizer with a token for each byte and for what looks like a control string."""
    pipeline = byte_pipeline(template)
    stops = (*_ENDS, *_MORE_ENDS)
    ends = [token["id"] for token in pipeline["added_tokens"] if token["content"] in stops]
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(pipeline, config, ends)


def byte_pipeline(template: str) -> dict[str, Any]:
    """Return the tokenizer.json of that: ids below 256 are bytes."""
    alphabet = _byte_alphabet()
    controls = sorted({*_CONTROL.findall(template), *SPOKEN, *_ENDS, *_MORE_ENDS, "<s>"})
    added = [
        {"id": 256 + i, "content": text, "special": True, "normalized": False}
        for i, text in enumerate(controls)
    ]
    return {
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": {alphabet[i]: i for i in range(256)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", **_RAW},
        "decoder": {"type": "ByteLevel", **_RAW},
    }


def _byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _loop(text: ModelText) -> tuple[float, float]:
    """Return which share of the log a tool result, and a user message, makes the engine compute."""
    messages: tuple[Message, ...] = (Message(role="user", text="find it"),)
    worst = 0.0
    for turn in range(LOOP):
        answer = generated(text, messages, [_CALLS[0]], f"step {turn}")
        result = Message(role="tool", text=f"line {turn}", name="look", call_id=f"c{turn:08d}")
        worst = max(worst, _recomputed(text, messages, answer, result))
        messages = (*messages, answer, result)
    answer = generated(text, messages, [], "done")
    question = Message(role="user", text="and now?")
    return worst, _recomputed(text, messages, answer, question)


def _recomputed(
    text: ModelText, before: tuple[Message, ...], answer: Message, new: Message
) -> float:
    compose = text.composer.tokens
    log = compose(Conversation((*before, answer), (_TOOL,)), False)
    after = compose(Conversation((*before, answer, new), (_TOOL,)))
    same = next((i for i, (a, b) in enumerate(zip(log, after, strict=False)) if a != b), len(log))
    return (len(log) - min(same, len(after))) / len(log)


def generated(
    text: ModelText, before: tuple[Message, ...], calls: list[tuple[str, dict[str, Any]]], said: str
) -> Message:
    """Return the message that a model would generate, with its ids, after `before`."""
    body = text.format.form.write(calls) if calls else said
    opened = text.composer.opens_reasoning({}, after_result=before[-1].role == "tool")
    if text.format.thought:
        opening, closing = text.format.thought
        body = f"{opening}Hm, {said}.{closing}" + (body if calls else f"{_FINAL}{said}")
    elif text.format.reasoning and (opened or text.composer.survival.reasoning):
        opening, closing = text.format.reasoning
        body = f"{'' if opened else opening}\nHm, {said}.\n{closing}\n\n{body}"
    ids = text.tokenizer.encode_render(body, "\ufdd0", "continuation")
    stream = _stream(text, in_reasoning=opened)
    stream.push(ids)
    stream.finish(stream.stopped or "stop")
    kept = ids[: stream.kept]
    made = [item for item in stream.items if isinstance(item, wire.ToolCallOut)]
    return Message(
        role="assistant",
        text=said,
        calls=tuple(
            Call(f"c{len(before):05d}{i:03d}", c.name, c.arguments) for i, c in enumerate(made)
        ),
        ids=pack(kept),
        body_start=min(stream.body_start, len(kept)),
    )


_FINAL = "<|channel|>final<|message|>"


def _stream(text: ModelText, *, in_reasoning: bool = False) -> OutputStream:
    return OutputStream(
        text.tokenizer,
        text.format,
        {_TOOL.name: _TOOL},
        mint_call=lambda: "call",
        mint_item=lambda: "item",
        in_reasoning=in_reasoning,
    )


def _round_trip(text: ModelText) -> bool | None:
    """Whether calls that the template writes are read as the same calls; None: it writes none."""
    if not text.composer.survival.calls:
        return None
    calls = _CALLS[: 1 if text.format.one_call else 2]
    user = Message(role="user", text="x")
    history = Message(
        role="assistant",
        calls=tuple(Call(f"call{i:05d}", name, args) for i, (name, args) in enumerate(calls)),
    )
    results = tuple(
        Message(role="tool", text="z", name=call.name, call_id=call.call_id)
        for call in history.calls
    )
    asked = text.composer.tokens(Conversation((user,), (_TOOL,)), False)
    told = text.composer.tokens(Conversation((user, history, *results), (_TOOL,)), False)
    stream = _stream(text)
    stops = set(text.tokenizer.stop_ids)
    begun = False
    for token in told[len(asked) :]:
        begun = begun or bool(text.tokenizer.token_bytes(token).strip())
        if token in stops and begun and stream.items:
            break
        if token not in stops:
            stream.push([token])
    stream.finish(stream.stopped or "stop")
    read = [(i.name, i.arguments) for i in stream.items if isinstance(i, wire.ToolCallOut)]
    return read == list(calls)
