"""The routes of responses: they are kept, can be gone on from, and can run in the background."""

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve import wire
from agentserve.dialects.index import Position
from agentserve.dialects.responses import answer
from agentserve.dialects.responses.request import ResponsesRequest, leading, read
from agentserve.dialects.responses.store import ResponseStore, Stored
from agentserve.dialects.shown import Ended, answered, gather
from agentserve.errors import (
    AgentserveError,
    InvalidRequest,
    RouteNotFound,
    SessionClosed,
    SessionNotFound,
    TurnNotFound,
)
from agentserve.server.answers import json_response, unexpected
from agentserve.server.dialect_turns import DialectTurns, Going

logger = logging.getLogger(__name__)


class ResponsesRoutes:
    """Everything under /v1/responses."""

    def __init__(self, turns: DialectTurns, store: ResponseStore) -> None:
        self._turns = turns
        self._store = store
        self._kept: set[asyncio.Task[None]] = set()

    def table(self) -> list[Route]:
        """Return the routes."""
        one = "/v1/responses/{id}"
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        turns = self._turns
        asked_for, unknown = await turns.read(request, ResponsesRequest)
        before = self._before(request.user, asked_for)
        calls, inherited = (before.calls, before.lead) if before else ((), [])
        asked = read(asked_for, calls=calls, inherited=inherited, **turns.naming)
        base: tuple[Position, bytes] | None = None
        if before is not None and before.position is not None:
            base = before.position, before.digest
        try:
            going = await turns.begin(request, asked, unknown, base)
        except (SessionNotFound, SessionClosed, TurnNotFound) as error:
            if base is None:
                raise
            raise _not_found(asked_for) from error
        answer_id = f"resp_{secrets.token_hex(16)}"
        response = answer.blank(answer_id, int(time.time()), asked, asked_for)
        lead = [*inherited, *leading(asked_for, [])]
        stored = Stored(response, _input(asked_for), going.resolved.session, going.turn.id, lead)
        if asked_for.store is not False:
            self._store.put(request.user, stored)
            if asked.stream or asked_for.background:
                self._keep(request.user, going, stored)
        if asked.stream:
            return self._streamed(request.user, going, stored)
        if asked_for.background:
            return json_response(response, headers=going.headers)
        try:
            ended = await turns.end(request, going)
        except BaseException:
            self._store.drop(request.user, answer_id)
            raise
        return turns.whole(going, ended, self._finish(request.user, going, stored, ended))

    async def compact(self, request: Request) -> Response:
        """POST /v1/responses/compact: not here; clients then compact by themselves."""
        raise RouteNotFound("this server compacts nothing: send the shortened history itself")

    async def get(self, request: Request) -> Response:
        """GET /v1/responses/{id}."""
        return json_response(self._known(request).body)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}: a turn that runs for it is cancelled; the session stays."""
        stored = self._known(request)
        self._store.drop(request.user, stored.body["id"])
        with contextlib.suppress(SessionNotFound, SessionClosed, TurnNotFound):
            await self._end(request.user, stored)
        return json_response({"id": stored.body["id"], "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: the response, ended now if it was running."""
        stored = self._known(request)
        await self._end(request.user, stored)
        return json_response(stored.body)

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items."""
        items = self._known(request).input
        ids = [one.get("id") for one in items if isinstance(one, dict)]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return json_response({"object": "list", "data": items, "has_more": False} | ends)

    async def _end(self, principal: str, stored: Stored) -> None:
        if stored.body["status"] == "in_progress":
            stored.body |= {"status": "cancelled"}
            await self._turns.service.cancel(
                principal, stored.session, wire.CancelRequest(turn=stored.turn)
            )

    def _before(self, principal: str, asked_for: ResponsesRequest) -> Stored | None:
        """Return the response that the request goes on from. Raises InvalidRequest."""
        if asked_for.previous_response_id is None:
            return None
        stored = self._store.get(principal, asked_for.previous_response_id)
        if stored is None or stored.position is None:
            raise _not_found(asked_for)
        return stored

    def _known(self, request: Request) -> Stored:
        stored = self._store.get(request.user, request.path_params["id"])
        if stored is None:
            raise TurnNotFound("there is no such response here, or no longer", param="response_id")
        return stored

    def _finish(self, principal: str, going: Going, stored: Stored, ended: Ended) -> dict[str, Any]:
        """Return the response as it ended; it is kept so."""
        if stored.position is not None:
            return stored.body  # another reader of the turn was first
        stored.body = answer.finished(stored.body, ended, int(time.time()))
        stored.position, stored.digest = going.resolved.place, going.resolved.digest
        stored.calls = answered(ended.parts).calls
        if self._store.get(principal, stored.body["id"]) is not None:
            self._store.put(principal, stored)
        return stored.body

    def _streamed(self, principal: str, going: Going, stored: Stored) -> Response:
        def done(ended: Ended) -> dict[str, Any]:
            return self._finish(principal, going, stored, ended)

        def broken(error: AgentserveError) -> bytes:
            return answer.failure_frame(stored.body, error)

        frames = answer.events(stored.body, going.steps, done)
        return self._turns.stream(going, frames, broken)

    def _keep(self, principal: str, going: Going, stored: Stored) -> None:
        """Bring a response to its end though nobody may wait for it."""
        handle = going.resolved.handle

        async def follow() -> None:
            try:
                # Read along: when the turn has ended, its buffer may no longer hold the beginning.
                ended = await gather(self._turns.follow(going.resolved))
                self._finish(principal, going, stored, ended)
            except AgentserveError as error:
                if stored.body["status"] == "in_progress":
                    if handle.done and (await handle.result()).status == "cancelled":
                        stored.body |= {"status": "cancelled"}
                    else:
                        stored.body = answer.failed(stored.body, error)
            except Exception:
                logger.exception("a response that nobody waited for broke")
                stored.body = answer.failed(stored.body, unexpected())

        task = asyncio.create_task(follow())
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)


def _input(asked_for: ResponsesRequest) -> list[Any]:
    if isinstance(asked_for.input, str):
        return [{"type": "message", "role": "user", "content": asked_for.input}]
    return asked_for.input or []


def _not_found(asked_for: ResponsesRequest) -> InvalidRequest:
    named = str(asked_for.previous_response_id)[:100]
    return InvalidRequest(
        f"Previous response with id {named!r} not found.", param="previous_response_id"
    )
