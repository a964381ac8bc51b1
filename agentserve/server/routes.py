"""The routes of API.md: decode the request, ask the session service, encode the answer."""

import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve import wire
from agentserve.config import ServerSettings
from agentserve.errors import EngineDown, InvalidRequest, MethodNotAllowed, ModelNotFound
from agentserve.server.answers import json_response
from agentserve.server.body import read_body, while_connected
from agentserve.server.idempotency import Answer, AnswerLedger, Scope, check_key
from agentserve.server.metrics import Metrics
from agentserve.server.sse import EventStream, frames
from agentserve.sessions.handle import TurnHandle
from agentserve.sessions.service import SessionService

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
PageSize = Annotated[int, Meta(ge=1, le=1000)]
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.:-]{0,127}(/[A-Za-z0-9][\w.:-]{0,127})?", re.ASCII)
EventSeq = Annotated[int, Meta(ge=0, le=10**15)]


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a route without parameters takes."""


class ListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GET /sessions."""

    state: Literal["idle", "queued", "running", "awaiting_tools", "closed"] | None = None
    tier: Literal["device", "host", "disk", "none"] | None = None
    after: wire.SessionId | None = None
    limit: PageSize = 100


class DeleteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """DELETE /sessions/{id}."""

    keep: Literal["transcript"] | None = None


class TranscriptQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GET /sessions/{id}/transcript."""

    format: Literal["items", "openai", "anthropic", "tokens"] = "items"


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GET /sessions/{id}/turns/{t}/events."""

    after: EventSeq = 0


class SessionRoutes:
    """Everything under /sessions."""

    def __init__(
        self,
        service: SessionService,
        settings: ServerSettings,
        ledger: AnswerLedger,
        metrics: Metrics,
    ) -> None:
        self._service = service
        self._settings = settings
        self._ledger = ledger
        self._metrics = metrics

    def table(self) -> list[Route]:
        """Return the routes, in the order of API.md."""
        one = "/sessions/{id}"
        return [
            _route("POST", "/sessions", self.create),
            _route("GET", "/sessions", self.listing, ListQuery),
            _route("GET", one, self.info),
            _route("GET", f"{one}/turns", self.turns),
            _route("GET", f"{one}/turns/{{turn}}", self.turn),
            _route("PATCH", one, self.patch),
            _route("DELETE", one, self.delete, DeleteQuery),
            _route("POST", f"{one}/turn", self.start_turn),
            _route("POST", f"{one}/tool_results", self.tool_results),
            _route("POST", f"{one}/hints", self.hints),
            _route("POST", f"{one}/fork", self.fork),
            _route("POST", f"{one}/rollback", self.rollback),
            _route("PUT", f"{one}/history", self.history),
            _route("POST", f"{one}/count", self.count),
            _route("POST", f"{one}/cancel", self.cancel),
            _route("GET", f"{one}/transcript", self.transcript, TranscriptQuery),
            _route("GET", f"{one}/turns/{{turn}}/events", self.events, EventsQuery),
        ]

    async def create(self, request: Request) -> Response:
        """POST /sessions: 201, or 200 when the same session was there already."""

        async def run(asked: wire.CreateRequest) -> Answer:
            info, created = await self._service.create(request.user, asked)
            return Answer(201 if created else 200, wire.encode(info))

        return await self._write(request, wire.CreateRequest, run)

    async def listing(self, request: Request) -> Response:
        """GET /sessions."""
        asked: ListQuery = request.state.query
        return json_response(
            await self._service.list(
                request.user,
                state=asked.state,
                tier=asked.tier,
                after=asked.after,
                limit=asked.limit,
            )
        )

    async def info(self, request: Request) -> Response:
        """GET /sessions/{id}."""
        return json_response(await self._service.info(request.user, _id(request)))

    async def turns(self, request: Request) -> Response:
        """GET /sessions/{id}/turns."""
        return json_response(await self._service.turns(request.user, _id(request)))

    async def turn(self, request: Request) -> Response:
        """GET /sessions/{id}/turns/{t}."""
        return json_response(
            await self._service.turn(request.user, _id(request), request.path_params["turn"])
        )

    async def patch(self, request: Request) -> Response:
        """PATCH /sessions/{id}."""
        asked = await self._read(request, wire.PatchRequest)
        return json_response(await self._service.patch(request.user, _id(request), asked))

    async def delete(self, request: Request) -> Response:
        """DELETE /sessions/{id}: 204."""
        asked: DeleteQuery = request.state.query
        await self._service.delete(
            request.user, _id(request), keep_transcript=asked.keep == "transcript"
        )
        return Response(status_code=204)

    async def start_turn(self, request: Request) -> Response:
        """POST /sessions/{id}/turn: the turn as JSON, or its events when `stream` is set."""
        with self._announced(request):
            body = await self._body(request)
            asked = wire.decode(body, wire.TurnRequest)

            async def run() -> Answer:
                handle = await self._service.start_turn(request.user, _id(request), asked)
                return Answer(200, turn_id=handle.turn_id)

            answer, replayed = await self._once(request, body, run)
        handle = await self._service.follow(request.user, _id(request), str(answer.turn_id))
        if asked.stream:
            return self._stream(handle, _last_event_id(request), replayed)
        handle.attach()
        try:
            turn = await while_connected(request.receive, handle.result())
        finally:
            handle.detach()
        return json_response(turn, headers=_replay_header(replayed))

    def _announced(self, request: Request) -> AbstractContextManager[None]:
        """Announce the session's next turn while its request is read, unless it is a replay."""
        key = request.headers.get("idempotency-key")
        if key is not None and self._ledger.knows(_scope(request, key)):
            return nullcontext()
        return self._service.turn_announced(request.user, _id(request))

    async def tool_results(self, request: Request) -> Response:
        """POST /sessions/{id}/tool_results."""
        return await self._act(request, wire.ToolResultsRequest, self._service.tool_results)

    async def hints(self, request: Request) -> Response:
        """POST /sessions/{id}/hints: 204."""

        async def run(asked: wire.Hints) -> Answer:
            await self._service.hints(request.user, _id(request), asked)
            return Answer(204)

        return await self._write(request, wire.Hints, run)

    async def fork(self, request: Request) -> Response:
        """POST /sessions/{id}/fork: 201."""
        return await self._act(request, wire.ForkRequest, self._service.fork, status=201)

    async def rollback(self, request: Request) -> Response:
        """POST /sessions/{id}/rollback."""
        return await self._act(request, wire.RollbackRequest, self._service.rollback)

    async def history(self, request: Request) -> Response:
        """PUT /sessions/{id}/history."""
        return await self._act(request, wire.HistoryRequest, self._service.history)

    async def count(self, request: Request) -> Response:
        """POST /sessions/{id}/count."""
        return await self._act(request, wire.CountRequest, self._service.count)

    async def cancel(self, request: Request) -> Response:
        """POST /sessions/{id}/cancel: the cancelled turn."""
        return await self._act(request, wire.CancelRequest, self._service.cancel)

    async def transcript(self, request: Request) -> Response:
        """GET /sessions/{id}/transcript."""
        asked: TranscriptQuery = request.state.query
        return json_response(
            await self._service.transcript(request.user, _id(request), asked.format)
        )

    async def events(self, request: Request) -> Response:
        """GET /sessions/{id}/turns/{t}/events: follow a turn, or resume after an event."""
        if request.method == "HEAD":
            raise MethodNotAllowed("an event stream has no HEAD", allowed=["GET"])
        asked: EventsQuery = request.state.query
        handle = await self._service.follow(request.user, _id(request), request.path_params["turn"])
        # A browser reconnects to the same URL: then the header is the newer of the two.
        return self._stream(handle, max(asked.after, _last_event_id(request)), replayed=False)

    def _stream(self, handle: TurnHandle, after: int, replayed: bool) -> Response:
        on_drop = self._metrics.count_dropped_reader
        stream = EventStream(
            handle,
            frames(handle.runs(after), on_drop),
            ping_s=self._settings.ping_s,
            send_timeout_s=self._settings.send_timeout_s,
            on_drop=on_drop,
        )
        stream.headers.update({"Turn-Id": handle.turn_id} | _replay_header(replayed))
        return stream

    async def _body(self, request: Request) -> bytes:
        settings = self._settings
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        return body or b"{}"

    async def _read(self, request: Request, shape: type[T]) -> T:
        return wire.decode(await self._body(request), shape)

    async def _write(
        self, request: Request, shape: type[T], run: Callable[[T], Awaitable[Answer]]
    ) -> Response:
        body = await self._body(request)
        asked = wire.decode(body, shape)
        answer, replayed = await self._once(request, body, lambda: run(asked))
        media_type = "application/json" if answer.body else None
        return Response(answer.body, answer.status, _replay_header(replayed), media_type)

    async def _act(
        self,
        request: Request,
        shape: type[T],
        act: Callable[[str, str, T], Awaitable[object]],
        status: int = 200,
    ) -> Response:
        async def run(asked: T) -> Answer:
            return Answer(status, wire.encode(await act(request.user, _id(request), asked)))

        return await self._write(request, shape, run)

    async def _once(
        self, request: Request, body: bytes, run: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, bool]:
        key = request.headers.get("idempotency-key")
        if key is None:
            return await run(), False
        return await self._ledger.once(_scope(request, check_key(key)), body, run)


class OperatorRoutes:
    """Health, metrics and the list of models."""

    def __init__(self, service: SessionService, settings: ServerSettings, metrics: Metrics) -> None:
        self._service = service
        self._settings = settings
        self._metrics = metrics

    def table(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.model, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """GET /health: the process answers."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: the engine is up and advancing; else 503 with the reason."""
        ready, reason = self._service.ready()
        if not ready:
            raise EngineDown(reason)
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: Prometheus text."""
        return Response(self._metrics.render(), media_type=self._metrics.media_type)

    async def models(self, request: Request) -> Response:
        """GET /v1/models, in the shapes of both OpenAI and Anthropic."""
        model = self._model(self._settings.model_name)
        listed = {"object": "list", "data": [model], "has_more": False}
        return json_response(listed | {"first_id": model["id"], "last_id": model["id"]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}: any name is served by the one model, unless names are strict."""
        name = request.path_params["id"]
        unknown = self._settings.strict_model and name != self._settings.model_name
        if unknown or not MODEL_NAME.fullmatch(name):
            raise ModelNotFound(f"this server serves {self._settings.model_name!r}", param="model")
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "agentserve",
            "type": "model",
            "display_name": name,
            "max_model_len": self._service.driver.info.max_context,  # vLLM's name for it
            "created_at": "1970-01-01T00:00:00Z",
        }


def _route(
    method: str, path: str, endpoint: Endpoint, query: type[msgspec.Struct] = NoQuery
) -> Route:
    """Return a route whose endpoint finds its checked parameters in `request.state.query`."""

    async def checked(request: Request) -> Response:
        request.state.query = wire.decode_query(request.query_params.multi_items(), query)
        return await endpoint(request)

    return Route(path, checked, methods=[method])


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _scope(request: Request, key: str) -> Scope:
    return request.user, f"{request.method} {request.url.path}", key


def _last_event_id(request: Request) -> int:
    value = request.headers.get("last-event-id", "0")
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise InvalidRequest("the number of an event is needed", param="Last-Event-ID")
    return int(value)


def _replay_header(replayed: bool) -> dict[str, str]:
    return {"Idempotency-Replayed": "true"} if replayed else {}
