"""An OpenAI-compatible endpoint that is not ours: real SSE over a real socket, made-up answers.

It counts words as tokens, knows the prefix of every prompt that it has seen, and ends an answer
after 8 tokens unless `ignore_eos` is set. What a user says can make it misbehave.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "foreign-7b"
OWN_END = 8  # tokens
STEP_S = 0.002


class Foreign:
    """The endpoint and what it was asked; `bodies` are the chat requests in order."""

    def __init__(
        self, *, key: str | None = None, context: int = 10**6, counts: str = "all"
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._key = key
        self._context = context
        self._counts = counts  # "all", "no cache", "none"
        self._seen: set[str] = set()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/bare/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            error = {"message": "Incorrect API key provided", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, 401)
        return None

    async def _models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": [{"id": MODEL}]})

    async def _chat(self, request: Request) -> Response:
        if refused := self._refusal(request):
            return refused
        body = await request.json()
        self.bodies.append(body)
        if body["model"] != MODEL:
            text = f"The model `{body['model']}` does not exist."
            return JSONResponse({"object": "error", "message": text, "code": 404}, 404)
        sizes = [1 + len(json.dumps(message).split()) for message in body["messages"]]
        if sum(sizes) + body["max_tokens"] > self._context:
            text = f"This model's maximum context length is {self._context} tokens."
            return JSONResponse({"error": {"message": text, "code": 400}}, 400)
        said = str(body["messages"][-1].get("content"))
        if said == "plain":
            return JSONResponse({"choices": [{"message": {"content": "hi"}}]})
        if said == "overloaded":
            return PlainTextResponse("<html>slow down</html>", 429)
        usage = self._usage(body["messages"], sizes)
        return StreamingResponse(self._events(body, said, usage), media_type="text/event-stream")

    def _usage(self, messages: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
        prefixes = [json.dumps(messages[: count + 1]) for count in range(len(messages))]
        cached = sum(
            size for size, prefix in zip(sizes, prefixes, strict=True) if prefix in self._seen
        )
        self._seen.update(prefixes)
        usage: dict[str, Any] = {"prompt_tokens": sum(sizes), "completion_tokens": 0}
        if self._counts == "all":
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    async def _events(
        self, body: dict[str, Any], said: str, usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        yield b": a comment\r\n\r\n" + chunk({"role": "assistant", "content": ""})
        count = body["max_tokens"] if body.get("ignore_eos") else min(body["max_tokens"], OWN_END)
        for number in range(count):
            await asyncio.sleep(STEP_S)
            if said == "fail":
                yield b'data: {"error": {"message": "out of memory"}}\n\n'
                return
            if said == "break off" and number == 2:
                return
            if said == "garble":
                yield b"data: {not json\n\n"
            if body.get("tools") and number >= 4:
                call = {"index": 0, "function": {"arguments": "x"}}
                yield chunk({"tool_calls": [call]})
            else:
                yield chunk({"content": "word "})
        yield chunk({}, "length" if count == body["max_tokens"] else "stop")
        if self._counts != "none" and body.get("stream_options"):
            data = json.dumps({"choices": [], "usage": usage | {"completion_tokens": count}})
            yield f"data: {data}\n\n".encode()
        yield b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """Return one event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return (
        f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()
    )
