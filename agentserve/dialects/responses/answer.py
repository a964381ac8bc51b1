"""The response object, and its stream of events."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from agentserve import wire
from agentserve.dialects.asked import Asked
from agentserve.dialects.responses.request import ResponsesRequest
from agentserve.dialects.shown import Closed, Ended, More, Opened, Part, Step, logprobs
from agentserve.errors import AgentserveError

_UNFINISHED = ("max_tokens", "context_full")


def blank(answer_id: str, created: int, asked: Asked, request: ResponsesRequest) -> dict[str, Any]:
    """Return a response that has just begun; `created` is in Unix seconds."""
    return {
        "id": answer_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": request.background is True,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": _text(request.prompt_cache_key),
        "reasoning": {name: (request.reasoning or {}).get(name) for name in ("effort", "summary")},
        "safety_identifier": _text(request.safety_identifier),
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": 0.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}} | (request.text or {}),
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool(tool) for tool in asked.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "truncation": "disabled",
        "usage": None,
        "user": _text(request.user),
        "metadata": request.metadata or {},
    }


def finished(response: dict[str, Any], ended: Ended, now: int) -> dict[str, Any]:
    """Return a response as its turn has left it."""
    cut = ended.turn.stop_reason in _UNFINISHED
    last = len(ended.parts) - 1
    output = [
        item(response["id"], part, "incomplete" if cut and part.index == last else "completed")
        for part in ended.parts
    ]
    return response | {
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else now,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": usage(ended.turn.usage),
    }


def failed(response: dict[str, Any], error: AgentserveError) -> dict[str, Any]:
    """Return a response that ended with an error."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return response | {"status": "failed", "error": {"code": code, "message": error.message}}


def usage(counts: wire.Usage) -> dict[str, Any]:
    """Return a turn's token counts."""
    return {
        "input_tokens": counts.input_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.output_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.input_tokens + counts.output_tokens,
    }


def item(answer_id: str, part: Part, status: str = "completed") -> dict[str, Any]:
    """Return a part as an output item."""
    name = f"{answer_id.removeprefix('resp_')}_{part.index}"
    if part.kind == "call":
        return {
            "type": "function_call",
            "id": f"fc_{name}",
            "call_id": part.call_id,
            "name": part.name,
            "arguments": part.text,
            "status": status,
        }
    begun = status == "in_progress"
    content = [] if begun else [_content(part)]
    if part.kind == "reasoning":
        return {
            "type": "reasoning",
            "id": f"rs_{name}",
            "summary": [],
            "content": content,
            "status": status,
        }
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": "assistant",
        "status": status,
        "content": content,
    }


async def events(
    response: dict[str, Any],
    steps: AsyncIterator[Step],
    done: Callable[[Ended], dict[str, Any]],
) -> AsyncIterator[bytes]:
    """Yield the frames of a stream up to the response's end; `done` returns it as it ended."""
    write = _Frames(response["id"])
    yield write("response.created", response=response)
    yield write("response.in_progress", response=response)
    async for step in steps:
        if isinstance(step, Opened):
            for frame in write.opened(step.part):
                yield frame
        elif isinstance(step, More):
            yield write.more(step)
        elif isinstance(step, Closed):
            for frame in write.closed(step.part):
                yield frame
        elif isinstance(step, Ended):
            whole = done(step)
            yield write(f"response.{whole['status']}", response=whole)
    yield DONE


DONE = b"data: [DONE]\n\n"
_TEXT = {"text": "output_text", "reasoning": "reasoning_text"}


class _Frames:
    """Numbers the events of one stream."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self._number = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + wire.encode(data) + b"\n\n"

    def opened(self, part: Part) -> list[bytes]:
        begun = Part(part.index, part.kind, "", part.call_id, part.name)
        shown = item(self._id, begun, "in_progress")
        frames = [self("response.output_item.added", output_index=part.index, item=shown)]
        if part.kind != "call":
            at = self._place(part)
            frames.append(self("response.content_part.added", **at, part=_content(begun)))
        return frames

    def more(self, step: More) -> bytes:
        part = step.part
        if part.kind == "call":
            at = {"item_id": item(self._id, part)["id"], "output_index": part.index}
            return self("response.function_call_arguments.delta", **at, delta=step.delta)
        at = self._place(part) | self._logprobs(part, step.logprobs)
        return self(f"response.{_TEXT[part.kind]}.delta", **at, delta=step.delta)

    def closed(self, part: Part) -> list[bytes]:
        whole = item(self._id, part)
        if part.kind == "call":
            at = {"item_id": whole["id"], "output_index": part.index, "name": part.name}
            kind = "response.function_call_arguments.done"
            frames = [self(kind, **at, arguments=part.text)]
        else:
            at = self._place(part)
            kind = f"response.{_TEXT[part.kind]}.done"
            frames = [
                self(kind, **at, **self._logprobs(part, part.logprobs), text=part.text),
                self("response.content_part.done", **at, part=_content(part)),
            ]
        ended = self("response.output_item.done", output_index=part.index, item=whole)
        return [*frames, ended]

    def _place(self, part: Part) -> dict[str, Any]:
        name = item(self._id, part)["id"]
        return {"item_id": name, "output_index": part.index, "content_index": 0}

    @staticmethod
    def _logprobs(part: Part, told: Sequence[wire.TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": logprobs(told)} if part.kind == "text" else {}


def failure_frame(response: dict[str, Any], error: AgentserveError) -> bytes:
    """Return the frames that end a stream that broke."""
    data = {
        "type": "response.failed",
        "sequence_number": 1 << 20,  # after every other
        "response": failed(response, error),
    }
    return b"event: response.failed\ndata: " + wire.encode(data) + b"\n\n" + DONE


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    told = logprobs(part.logprobs)
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": told}


def _tool(tool: wire.Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
