"""The ASGI application: middleware, routes and the life of the session service.

Every middleware is plain ASGI: wrappers that buffer the response would hide a client's departure.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from agentserve.clock import Clock
from agentserve.config import ServerSettings
from agentserve.dialects.resolve import Resolver
from agentserve.dialects.responses.store import ResponseStore
from agentserve.server.answers import ErrorBoundary, http_exception
from agentserve.server.auth import Gate, check_bind
from agentserve.server.dialect_turns import DialectTurns
from agentserve.server.dialects import DialectRoutes
from agentserve.server.idempotency import AnswerLedger
from agentserve.server.metrics import Metrics
from agentserve.server.responses import ResponsesRoutes
from agentserve.server.routes import OperatorRoutes, SessionRoutes
from agentserve.sessions.service import SessionService

logger = logging.getLogger(__name__)

DRAIN_S = 5.0  # open turns may end within, when the server stops


def create_app(service: SessionService, settings: ServerSettings, clock: Clock) -> Starlette:
    """Return the application that serves `service`; its lifespan runs, drains and closes it.

    Raises ValueError when the settings would open the server to the network without a key.
    """
    check_bind(settings)
    ledger = AnswerLedger(clock)
    metrics = Metrics(service, ledger)
    resolver = Resolver(service, settings, clock)
    responses = ResponseStore(settings.stored_responses_bytes)
    metrics.watch(resolver, responses)
    turns = DialectTurns(service, settings, resolver, metrics)
    service.driver.commits.observers.append(metrics.observe_turn)
    app = Starlette(
        routes=[
            *SessionRoutes(service, settings, ledger, metrics).table(),
            *DialectRoutes(turns).table(),
            *ResponsesRoutes(turns, responses).table(),
            *OperatorRoutes(service, settings, metrics).table(),
        ],
        middleware=[
            Middleware(ErrorBoundary, count=metrics.count_error),
            Middleware(Gate, settings=settings),
        ],
        exception_handlers={HTTPException: http_exception},
        lifespan=lambda _: _running(service),
    )
    app.router.redirect_slashes = False
    return app


@contextlib.asynccontextmanager
async def _running(service: SessionService) -> AsyncIterator[None]:
    pump = asyncio.create_task(service.run(), name="session service")
    pump.add_done_callback(_report)
    try:
        yield
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await service.drain()
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        await service.close()


def _report(pump: "asyncio.Task[None]") -> None:
    if not pump.cancelled() and (error := pump.exception()) is not None:
        logger.critical("the session service stopped", exc_info=error)
