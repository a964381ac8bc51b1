"""What the routes of all dialects share: begin a turn in its session, follow it, answer."""

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve import wire
from agentserve.config import ServerSettings
from agentserve.dialects import signals
from agentserve.dialects.asked import Asked
from agentserve.dialects.common import decode
from agentserve.dialects.finding import SIGNALS
from agentserve.dialects.index import Position
from agentserve.dialects.resolve import Resolved, Resolver
from agentserve.dialects.shown import Begun, Ended, Step, gather, steps
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


@dataclass(frozen=True)
class Going:
    """A dialect request whose turn runs."""

    resolved: Resolved
    steps: AsyncIterator[Step]
    turn: wire.Turn  # as it was admitted
    headers: dict[str, str]


class DialectTurns:
    """Turns of dialect requests on native sessions."""

    def __init__(
        self,
        service: SessionService,
        settings: ServerSettings,
        resolver: Resolver,
        metrics: Metrics,
    ) -> None:
        self.service = service
        self.settings = settings
        self.resolver = resolver
        self.metrics = metrics

    @property
    def naming(self) -> dict[str, Any]:
        """How requests name the model: arguments of each dialect's `read`."""
        return {"served": self.settings.model_name, "strict": self.settings.strict_model}

    async def read(self, request: Request, shape: type[S]) -> tuple[S, list[str]]:
        """Return the body of a request, and the names of fields that `shape` does not have."""
        settings = self.settings
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        return decode(body, shape)

    async def begin(
        self,
        request: Request,
        asked: Asked,
        unknown: list[str],
        base: tuple[Position, bytes] | None = None,
    ) -> Going:
        """Start the turn and wait until it was admitted or refused.

        base: the place that `previous_response_id` names, and the digest of its history.
        """
        self.metrics.count_unread(asked.dialect, len(unknown), len(asked.warnings))
        if unknown:
            logger.debug("unknown fields of %s: %s", asked.dialect, ", ".join(unknown)[:500])
        found = (*asked.signals, *signals.from_headers(dict(request.headers)))
        asked.signals = sorted(found, key=lambda one: SIGNALS.index(one.name))
        resolved = await self.resolver.begin(request.user, asked, *(base or ()))
        follow = self.follow(resolved)
        with _reading(resolved.handle):
            first = await while_connected(request.receive, _first(follow))
        headers = {"X-AgentServe-Session": resolved.session}
        if asked.warnings:
            said = (f"{text} ({count})" for text, count in Counter(asked.warnings).items())
            headers["X-AgentServe-Warning"] = ", ".join(said)
        turn = await self.service.turn(request.user, resolved.session, resolved.handle.turn_id)
        return Going(resolved, _again(first, follow), turn, headers)

    async def follow(self, resolved: Resolved) -> AsyncGenerator[Step, None]:
        """Yield what a turn shows; its end is remembered before anybody is told."""
        async for step in _steps(resolved.handle):
            if isinstance(step, Ended):
                self.resolver.finish(resolved, step.turn, step.parts)
            yield step

    async def end(self, request: Request, going: Going) -> Ended:
        """Wait for the end of the turn. Raises what it failed of, and ClientDisconnect."""
        with _reading(going.resolved.handle):
            return await while_connected(request.receive, gather(going.steps))

    def whole(self, going: Going, ended: Ended, body: dict[str, Any]) -> Response:
        """Return an answer that is not streamed."""
        timing = server_timing(ended.turn.timing_ms)
        return json_response(body, headers=going.headers | {"Server-Timing": timing})

    def stream(
        self,
        going: Going,
        frames: AsyncIterator[bytes],
        error_frame: ErrorFrame,
        ping: bytes = PING,
    ) -> Response:
        """Return a streamed answer."""
        on_drop = self.metrics.count_dropped_reader
        stream = EventStream(
            going.resolved.handle,
            self._guarded(frames, error_frame),
            ping_s=self.settings.ping_s,
            send_timeout_s=self.settings.send_timeout_s,
            on_drop=on_drop,
            ping=ping,
        )
        stream.headers.update(
            going.headers | {"Server-Timing": server_timing(going.turn.timing_ms)}
        )
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
                self.metrics.count_dropped_reader("behind")
            self.metrics.count_error(error.code)
            yield error_frame(error)
        except Exception:
            logger.exception("a stream broke")
            yield error_frame(unexpected())


async def _steps(handle: TurnHandle) -> AsyncGenerator[Step, None]:
    """Yield what a turn shows, all of it at its end if it was too fast to be followed."""
    shown = False
    try:
        async for step in steps(handle.events()):
            shown = shown or not isinstance(step, Begun)
            yield step
    except FellBehind:
        if shown:
            raise
        await handle.result()
        async for step in steps(handle.events()):
            yield step


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
