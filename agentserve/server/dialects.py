"""The routes of chat completions and messages."""

import secrets
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve import wire
from agentserve.dialects.chat import answer as chat_answer
from agentserve.dialects.chat.request import ChatRequest
from agentserve.dialects.chat.request import read as read_chat
from agentserve.dialects.errors import anthropic_error, openai_error
from agentserve.dialects.messages import answer as messages_answer
from agentserve.dialects.messages.request import MessagesRequest
from agentserve.dialects.messages.request import read as read_messages
from agentserve.errors import AgentserveError
from agentserve.server.answers import json_response
from agentserve.server.dialect_turns import DialectTurns


class DialectRoutes:
    """Chat completions and messages."""

    def __init__(self, turns: DialectTurns) -> None:
        self._turns = turns

    def table(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        turns = self._turns
        asked_for, unknown = await turns.read(request, ChatRequest)
        asked = read_chat(asked_for, **turns.naming)
        going = await turns.begin(request, asked, unknown)
        answer_id, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        if not asked.stream:
            ended = await turns.end(request, going)
            body = chat_answer.whole(
                answer_id, asked.model, created, ended, with_logprobs=asked.logprobs
            )
            return turns.whole(going, ended, body)
        options = asked_for.stream_options
        counted = options is not None and options.include_usage is True
        frames = chat_answer.chunks(answer_id, asked.model, created, going.steps, counted)
        return turns.stream(going, frames, _chat_error)

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        turns = self._turns
        asked_for, unknown = await turns.read(request, MessagesRequest)
        asked = read_messages(asked_for, **turns.naming)
        going = await turns.begin(request, asked, unknown)
        answer_id = f"msg_{secrets.token_hex(12)}"
        stops = asked_for.stop_sequences or []
        if not asked.stream:
            ended = await turns.end(request, going)
            body = messages_answer.whole(answer_id, asked.model, ended, stops)
            return turns.whole(going, ended, body)
        counts = going.turn.usage
        frames = messages_answer.events(answer_id, asked.model, counts, going.steps, stops)
        return turns.stream(going, frames, _messages_error, messages_answer.PING)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        turns = self._turns
        asked_for, unknown = await turns.read(request, MessagesRequest)
        asked = read_messages(asked_for, generates=False, **turns.naming)
        turns.metrics.count_unread(asked.dialect, len(unknown), len(asked.warnings))
        tokens = await turns.resolver.count(request.user, asked)
        return json_response({"input_tokens": tokens})


def _chat_error(error: AgentserveError) -> bytes:
    return b"data: " + wire.encode(openai_error(error)) + b"\n\n"


def _messages_error(error: AgentserveError) -> bytes:
    return b"event: error\ndata: " + wire.encode(anthropic_error(error)) + b"\n\n"
