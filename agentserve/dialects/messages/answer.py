"""Answers of messages: whole, and as a stream of events."""

from collections.abc import AsyncIterator
from typing import Any

from agentserve import wire
from agentserve.dialects.asked import arguments_of
from agentserve.dialects.shown import Closed, Ended, More, Opened, Part, Step

REASONS = {
    "end": "end_turn",
    "stop_sequence": "stop_sequence",
    "tool_calls": "tool_use",
    "failed_after_calls": "tool_use",
    "max_tokens": "max_tokens",
    "context_full": "model_context_window_exceeded",
}
_UNSTOPPED = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def whole(answer_id: str, model: str, ended: Ended, stops: list[str]) -> dict[str, Any]:
    """Return the body of an answer; `stops` are the stop sequences that were asked for."""
    blocks = [_block(part) for part in ended.parts] or [_block(Part(0, "text"))]
    return {
        **_message(answer_id, model, blocks),
        **_stop(ended, stops),
        "usage": usage(ended.turn.usage),
    }


def usage(counts: wire.Usage, output: int | None = None) -> dict[str, Any]:
    """Return a turn's token counts: `input_tokens` are those that were not cached."""
    return {
        "input_tokens": counts.input_tokens - counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": counts.output_tokens if output is None else output,
        "output_tokens_details": {"thinking_tokens": counts.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


async def events(
    answer_id: str, model: str, counts: wire.Usage, steps: AsyncIterator[Step], stops: list[str]
) -> AsyncIterator[bytes]:
    """Yield the frames of a stream; `counts` are what is known when the turn was admitted."""
    started = _message(answer_id, model, []) | _UNSTOPPED
    yield _event("message_start", message=started | {"usage": usage(counts, 0)})
    yield PING
    async for step in steps:
        if isinstance(step, Opened):
            block = _block(Part(0, step.part.kind, "", step.part.call_id, step.part.name))
            yield _event("content_block_start", index=step.part.index, content_block=block)
        elif isinstance(step, More):
            yield _event("content_block_delta", index=step.part.index, delta=_delta(step))
        elif isinstance(step, Closed):
            if step.part.kind == "reasoning":
                signed = {"type": "signature_delta", "signature": ""}
                yield _event("content_block_delta", index=step.part.index, delta=signed)
            yield _event("content_block_stop", index=step.part.index)
        elif isinstance(step, Ended):
            if not step.parts:
                block = _block(Part(0, "text"))
                yield _event("content_block_start", index=0, content_block=block)
                yield _event("content_block_stop", index=0)
            yield _event("message_delta", delta=_stop(step, stops), usage=usage(step.turn.usage))
            yield _event("message_stop")


def _message(answer_id: str, model: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "container": None,
    }


def _stop(ended: Ended, stops: list[str]) -> dict[str, Any]:
    reason = REASONS.get(ended.turn.stop_reason or "end", "end_turn")
    called = any(part.kind == "call" for part in ended.parts)
    if reason == "tool_use" and not called:
        reason = "end_turn"
    stopped = reason == "stop_sequence"
    # Which one it was is not known when there are several: none is better than a wrong one.
    sequence = stops[0] if stopped and len(stops) == 1 else None
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        arguments = arguments_of(part.text)
        named = {"type": "tool_use", "id": part.call_id, "name": part.name}
        return named | {"input": arguments, "caller": {"type": "direct"}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text, "citations": None}


def _delta(step: More) -> dict[str, Any]:
    if step.part.kind == "call":
        return {"type": "input_json_delta", "partial_json": step.delta}
    if step.part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": step.delta}
    return {"type": "text_delta", "text": step.delta}


def _event(kind: str, **fields: Any) -> bytes:
    data = wire.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
