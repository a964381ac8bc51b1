"""Answers of chat completions: whole, and as a stream of chunks."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from agentserve import wire
from agentserve.dialects.shown import Ended, More, Opened, Part, Step, logprobs, text_of

REASONS = {
    "end": "stop",
    "stop_sequence": "stop",
    "tool_calls": "tool_calls",
    "failed_after_calls": "tool_calls",
    "max_tokens": "length",
    "context_full": "length",
}


def whole(
    answer_id: str, model: str, created: int, ended: Ended, *, with_logprobs: bool = False
) -> dict[str, Any]:
    """Return the body of an answer; `created` is in Unix seconds."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text_of(ended.parts) or None,
        "refusal": None,
        "annotations": [],
    }
    if thought := text_of(ended.parts, "reasoning"):
        message["reasoning_content"] = thought
    calls = [_call(part) for part in ended.parts if part.kind == "call"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    told = [one for part in ended.parts for one in part.logprobs]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(told) if with_logprobs else None,
        "finish_reason": finish_reason(ended),
    }
    return {
        **_head(answer_id, "chat.completion", model, created),
        "choices": [choice],
        "usage": usage(ended.turn.usage),
    }


def finish_reason(ended: Ended) -> str:
    """Return why the answer ends."""
    reason = REASONS.get(ended.turn.stop_reason or "end", "stop")
    calls = any(part.kind == "call" for part in ended.parts)
    if reason == "tool_calls" and not calls:
        return "stop"
    return "tool_calls" if reason == "stop" and calls else reason


def usage(counts: wire.Usage) -> dict[str, Any]:
    """Return a turn's token counts."""
    return {
        "prompt_tokens": counts.input_tokens,
        "completion_tokens": counts.output_tokens,
        "total_tokens": counts.input_tokens + counts.output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": counts.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def chunks(
    answer_id: str, model: str, created: int, steps: AsyncIterator[Step], include_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the frames of a stream, from the role to [DONE]."""
    head = _head(answer_id, "chat.completion.chunk", model, created)
    if include_usage:
        head["usage"] = None

    def frame(
        delta: dict[str, Any],
        reason: str | None = None,
        told: Sequence[wire.TokenLogprob] = (),
    ) -> bytes:
        beside = _logprobs(told) if told else None
        choice = {"index": 0, "delta": delta, "logprobs": beside, "finish_reason": reason}
        return _data({**head, "choices": [choice]})

    yield frame({"role": "assistant", "content": "", "refusal": None})
    calls: dict[int, int] = {}  # place among the parts -> place among the calls
    async for step in steps:
        if isinstance(step, Opened) and step.part.kind == "call":
            calls[step.part.index] = len(calls)
            begun = _call(step.part) | {"index": calls[step.part.index]}
            begun["function"] = {"name": step.part.name, "arguments": ""}
            yield frame({"tool_calls": [begun]})
        elif isinstance(step, More):
            yield frame(_delta(step, calls), told=step.logprobs)
        elif isinstance(step, Ended):
            yield frame({}, finish_reason(step))
            if include_usage:
                yield _data({**head, "choices": [], "usage": usage(step.turn.usage)})
    yield b"data: [DONE]\n\n"


def _delta(step: More, calls: dict[int, int]) -> dict[str, Any]:
    if step.part.kind == "call":
        more = {"index": calls[step.part.index], "function": {"arguments": step.delta}}
        return {"tool_calls": [more]}
    name = "content" if step.part.kind == "text" else "reasoning_content"
    return {name: step.delta}


def _logprobs(told: Sequence[wire.TokenLogprob]) -> dict[str, Any]:
    return {"content": logprobs(told), "refusal": None}


def _call(part: Part) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.text}
    return {"id": part.call_id, "type": "function", "function": function}


def _head(answer_id: str, kind: str, model: str, created: int) -> dict[str, Any]:
    return {
        "id": answer_id,
        "object": kind,
        "created": created,
        "model": model,
        "service_tier": "default",
        "system_fingerprint": "agentserve",
    }


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + wire.encode(value) + b"\n\n"
