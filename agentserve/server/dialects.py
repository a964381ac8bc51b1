"""The routes of the dialects: read the request, resolve its session, write the answer."""

import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve import wire
from agentserve.config import ServerSettings
from agentserve.dialects import signals
from agentserve.dialects.asked import Asked
from agentserve.dialects.chat import answer as chat_answer
from agentserve.dialects.chat.request import ChatRequest
from agentserve.dialects.chat.request import read as read_chat
from agentserve.dialects.common import decode
from agentserve.dialects.errors import anthropic_error, openai_error
from agentserve.dialects.messages import answer as messages_answer
from agentserve.dialects.messages.request import MessagesRequest
from agentserve.dialects.messages.request import read as read_messages
from agentserve.dialects.resolve import Resolved, Resolver
from agentserve.dialects.shown import Ended, Step, gather, steps
from agentserve.errors import AgentserveError
from agentserve.server.answers import json_response, unexpected
from agentserve.server.body import read_body, while_connected
from agentserve.server.metrics import Metrics
from agentserve.server.sse import PING, EventStream
from agentserve.sessions.handle import FellBehind, TurnHandle
from agentserve.sessions.service import SessionService

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=msgspec.Struct)
ErrorFrame = Callable[[AgentserveError], bytes]


def _chat_error(error: AgentserveError) -> bytes:
    return b"data: " + wire.encode(openai_error(error)) + b"\n\n"


def _messages_error(error: AgentserveError) -> bytes:
    return b"event: error\ndata: " + wire.encode(anthropic_error(error)) + b"\n\n"


@dataclass(frozen=True)
class Going:
    """A dialect request whose turn runs."""

    asked: Asked
    resolved: Resolved
    steps: AsyncIterator[Step]
    turn: wire.Turn  # as it was admitted
    headers: dict[str, str]


class DialectRoutes:
    """Chat completions and messages."""

    def __init__(
        self,
        service: SessionService,
        settings: ServerSettings,
        resolver: Resolver,
        metrics: Metrics,
    ) -> None:
        self._service = service
        self._settings = settings
        self._resolver = resolver
        self._metrics = metrics

    def table(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked_for, unknown = await self._read(request, ChatRequest)
        asked = read_chat(asked_for, self._settings.model_name, **self._naming)
        going = await self._begin(request, asked, "chat", unknown)
        answer_id, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        if not asked.stream:
            ended = await self._end(request, going)
            return self._whole(
                going, ended, chat_answer.whole(answer_id, asked.model, created, ended)
            )
        options = asked_for.stream_options
        counted = options is not None and options.include_usage is True
        frames = chat_answer.chunks(answer_id, asked.model, created, going.steps, counted)
        return self._stream(going, frames, _chat_error)

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        asked_for, unknown = await self._read(request, MessagesRequest)
        asked = read_messages(asked_for, self._settings.model_name, **self._naming)
        going = await self._begin(request, asked, "messages", unknown)
        answer_id = f"msg_{secrets.token_hex(12)}"
        stops = asked_for.stop_sequences or []
        if not asked.stream:
            ended = await self._end(request, going)
            return self._whole(
                going, ended, messages_answer.whole(answer_id, asked.model, ended, stops)
            )
        counts = going.turn.usage
        frames = messages_answer.events(answer_id, asked.model, counts, going.steps, stops)
        return self._stream(going, frames, _messages_error, messages_answer.PING)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        asked_for, unknown = await self._read(request, MessagesRequest)
        name = self._settings.model_name
        asked = read_messages(asked_for, name, generates=False, **self._naming)
        self._metrics.count_unread("messages", len(unknown), len(asked.warnings))
        tokens = await self._resolver.count(request.user, asked)
        return json_response({"input_tokens": tokens})

    @property
    def _naming(self) -> dict[str, bool]:
        return {"strict": self._settings.strict_model}

    async def _read(self, request: Request, shape: type[S]) -> tuple[S, list[str]]:
        settings = self._settings
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        return decode(body, shape)

    async def _begin(
        self, request: Request, asked: Asked, dialect: str, unknown: list[str]
    ) -> Going:
        """Start the turn and wait until it was admitted or refused."""
        self._metrics.count_unread(dialect, len(unknown), len(asked.warnings))
        if unknown:
            logger.debug("unknown fields of %s: %s", dialect, ", ".join(unknown)[:500])
        explicit, rest = [], []
        for signal in (*asked.signals, *signals.from_headers(dict(request.headers))):
            (explicit if signal.name == signals.EXPLICIT else rest).append(signal)
        order = ("previous_response", "header", "metadata", "cache_key")
        asked.signals = [*explicit, *sorted(rest, key=lambda one: order.index(one.name))]
        resolved = await self._resolver.begin(request.user, asked)
        follow = self._follow(resolved)
        with _reading(resolved.handle):
            first = await while_connected(request.receive, _first(follow))
        headers = {"X-AgentServe-Session": resolved.session, "X-Request-Id": _request_id()}
        headers["request-id"] = headers["X-Request-Id"]
        if asked.warnings:
            said = (f"{text} ({count})" for text, count in Counter(asked.warnings).items())
            headers["X-AgentServe-Warning"] = ", ".join(said)
        turn = await self._service.turn(
            request.user, resolved.session, resolved.handle.turn_id
        )
        return Going(asked, resolved, _again(first, follow), turn, headers)

    async def _follow(self, resolved: Resolved) -> AsyncGenerator[Step, None]:
        """Yield what a turn shows; its end is remembered before anybody is told."""
        async for step in steps(resolved.handle.events()):
            if isinstance(step, Ended):
                self._resolver.finish(resolved, step.turn, step.parts)
            yield step

    async def _end(self, request: Request, going: Going) -> Ended:
        with _reading(going.resolved.handle):
            return await while_connected(request.receive, gather(going.steps))

    def _whole(self, going: Going, ended: Ended, body: dict[str, Any]) -> Response:
        timing = server_timing(ended.turn.timing_ms)
        return json_response(body, headers=going.headers | {"Server-Timing": timing})

    def _stream(
        self,
        going: Going,
        frames: AsyncIterator[bytes],
        error_frame: ErrorFrame,
        ping: bytes = PING,
    ) -> Response:
        on_drop = self._metrics.count_dropped_reader
        stream = EventStream(
            going.resolved.handle,
            self._guarded(frames, error_frame),
            ping_s=self._settings.ping_s,
            send_timeout_s=self._settings.send_timeout_s,
            on_drop=on_drop,
            ping=ping,
        )
        stream.headers.update(going.headers | {"Server-Timing": server_timing(going.turn.timing_ms)})
        return stream

    async def _guarded(
        self, frames: AsyncIterator[bytes], error_frame: ErrorFrame
    ) -> AsyncGenerator[bytes, None]:
        """Yield the frames; a failure becomes the dialect's error, which ends the stream."""
        try:
            async for frame in frames:
                yield frame
        except AgentserveError as error:
            if isinstance(error, FellBehind):
                self._metrics.count_dropped_reader("behind")
            self._metrics.count_error(error.code)
            yield error_frame(error)
        except Exception:
            logger.exception("a stream broke")
            yield error_frame(unexpected())


@contextlib.contextmanager
def _reading(handle: TurnHandle) -> Iterator[None]:
    """Count a reader of the turn while the block runs."""
    handle.attach()
    try:
        yield
    finally:
        handle.detach()


async def _first(follow: AsyncIterator[Step]) -> Step:
    return await anext(follow)


async def _again(first: Step, rest: AsyncIterator[Step]) -> AsyncIterator[Step]:
    """Yield a step that was read ahead, then the others."""
    yield first
    async for step in rest:
        yield step


def server_timing(timing: wire.Timing) -> str:
    """Return a turn's phases as the Server-Timing header has them, in milliseconds."""
    phases = ("queue", "restore", "prefill", "decode", "total")
    return ", ".join(f"{phase};dur={getattr(timing, phase)}" for phase in phases)


def _request_id() -> str:
    return f"req_{secrets.token_hex(12)}"
