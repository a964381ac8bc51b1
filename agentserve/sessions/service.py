"""The native API as methods: one for each route of API.md."""

import asyncio
import contextlib
import logging
import random
from contextlib import AbstractContextManager

import msgspec

from agentserve.clock import Clock
from agentserve.config import ServerSettings
from agentserve.engine.messages import EngineLink, Stats
from agentserve.errors import AgentserveError, InvalidRequest, ModelNotFound, TurnNotFound
from agentserve.sessions import records, sampling
from agentserve.sessions.accounting import Counters
from agentserve.sessions.driver import TurnDriver
from agentserve.sessions.handle import TurnHandle, finished_handle
from agentserve.sessions.heads import HeadMoves, check_tools
from agentserve.sessions.prepare import TurnPreparer
from agentserve.sessions.registry import Registry
from agentserve.sessions.residency import tiers
from agentserve.sessions.script import Script
from agentserve.sessions.session import Profile, Session
from agentserve.sessions.store import Store
from agentserve.sessions.text import ModelText
from agentserve.sessions.transcript import Answer, transcript
from agentserve.sessions.turn import TurnRun
from agentserve.wire import (
    CancelRequest,
    CountAnswer,
    CountRequest,
    CreateRequest,
    ForkAnswer,
    ForkRequest,
    HeadAnswer,
    Hints,
    HistoryRequest,
    PatchRequest,
    RollbackRequest,
    SessionInfo,
    SessionList,
    ToolResultsAnswer,
    ToolResultsRequest,
    Turn,
    TurnList,
    TurnRequest,
)

log = logging.getLogger(__name__)

SWEEP_S = 0.25  # how often grace periods and ttls are looked at
MAX_PAGE = 1000


class ServiceStats(msgspec.Struct):
    """What /metrics shows of the sessions."""

    sessions: int
    states: dict[str, int]
    open_turns: int
    counters: Counters
    engine: Stats | None
    ready: bool
    heartbeat_age_s: float
    store_bytes: int
    template_mismatches: int


class SessionService:
    """Sessions of one model on one engine. Methods raise AgentserveError subclasses."""

    def __init__(  # noqa: PLR0913 - one argument per part that a service is made of
        self,
        link: EngineLink,
        text: ModelText,
        store: Store,
        settings: ServerSettings,
        clock: Clock,
        random: random.Random,
        script: Script | None = None,
    ) -> None:
        preparer = TurnPreparer(text, settings, random, lambda: self.driver.info, script)
        self.driver = TurnDriver(link, preparer, store, settings, clock)
        self._registry = Registry(clock, random, settings.max_sessions, self.driver.sequences)
        self._heads = HeadMoves(self.driver, self._registry, store, link, clock)
        self._text = text
        self._link = link
        self._store = store
        self._clock = clock
        self._drain_s = settings.drain_s

    # Life

    async def run(self) -> None:
        """Serve the engine's events and the timers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.driver.pump())
            group.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception:
                log.exception("a sweep failed; the next one tries again")

    async def sweep(self) -> None:
        """Cancel turns whose readers are gone and close sessions whose ttl has run out."""
        await self.driver.sweep()
        for session in self._registry.expired():
            await self._remove(session)

    def ready(self) -> tuple[bool, str]:
        """Return whether turns are taken, and if not, why."""
        return self.driver.ready()

    def stats(self) -> ServiceStats:
        """Return counts for /metrics."""
        states: dict[str, int] = {}
        for session in self._registry.all():
            state = session.state()
            states[state] = states.get(state, 0) + 1
        return ServiceStats(
            sessions=len(self._registry),
            states=states,
            open_turns=self.driver.open_turns,
            counters=self.driver.commits.counters,
            engine=self.driver.stats,
            ready=self.ready()[0],
            heartbeat_age_s=self.driver.heartbeat_age_s,
            store_bytes=self._store.size,
            template_mismatches=self._text.composer.mismatches,
        )

    async def drain(self) -> None:
        """Take no new turns, give the open ones `drain_s` to end, then cancel what is left."""
        self.driver.draining = True
        runs = [run for session in self._registry.all() for run in session.open_runs()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                for run in runs:
                    await run.handle.result()
        for run in runs:
            await self.driver.cancel(run, "none")
            await run.handle.result()

    async def close(self) -> None:
        """Stop the engine."""
        self.driver.draining = True
        await self._link.close()

    # Sessions

    async def create(self, principal: str, request: CreateRequest) -> tuple[SessionInfo, bool]:
        """Create a session, or return the one that the same body created (False)."""
        info = self.driver.info
        if request.model is not None and request.model != self._text.name:
            raise ModelNotFound(f"this server serves {self._text.name!r}", param="model")
        await asyncio.to_thread(check_tools, request.tools)
        if existing := self._registry.existing(principal, request):
            return self._info(existing), False
        sampling.check(request.sampling, info.vocab_size)
        session = self._registry.new(principal, request.id, self._profile(request))
        if request.history:
            self._heads.import_into(session, request.history)
        self._registry.add(session, request)
        try:
            await self._store.accept(session.key, "session", msgspec.json.encode(request))
        except BaseException:
            self._registry.discard(session)
            raise
        return self._info(session), True

    def _profile(self, request: CreateRequest) -> Profile:
        return Profile(
            model=self._text.name,
            system=request.system,
            tools=tuple(request.tools),
            sampling=request.sampling,
            on_template_rewrite=request.on_template_rewrite,
            template_options=request.template_options,
            ttl_ms=request.ttl_ms,
            metadata=request.metadata,
        )

    async def list(
        self,
        principal: str,
        *,
        state: str | None = None,
        tier: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> SessionList:
        """Return a page of the principal's sessions, oldest first."""
        sessions = self._registry.of(principal)
        if after is not None:
            ids = [session.id for session in sessions]
            if after not in ids:
                raise InvalidRequest("no such session: list from the start again", param="after")
            sessions = sessions[ids.index(after) + 1 :]
        found = [session for session in sessions if state in (None, session.state())]
        if tier is not None:
            await self.driver.locate(found)
            found = [session for session in found if tier in tiers(session.mirror)]
        page = found[: max(1, min(limit, MAX_PAGE))]
        if tier is None:
            await self.driver.locate(page)
        last = page[-1].id if len(page) < len(found) else None
        return SessionList([self._info(session) for session in page], last)

    async def info(self, principal: str, session_id: str) -> SessionInfo:
        """Return one session."""
        session = self._registry.get(principal, session_id)
        await self.driver.locate([session])
        return self._info(session)

    def _info(self, session: Session) -> SessionInfo:
        session.mirror.sync(self.driver.incarnation)
        return session.info(self.driver.info.max_context)

    async def patch(self, principal: str, session_id: str, request: PatchRequest) -> HeadAnswer:
        """Change metadata, ttl or tools."""
        return await self._heads.patch(self._registry.open(principal, session_id), request)

    async def delete(self, principal: str, session_id: str, *, keep_transcript: bool) -> None:
        """Close a session and free what it holds; its running turn is cancelled."""
        session = self._registry.get(principal, session_id)
        if keep_transcript:
            await self._close(session)
        else:
            await self._remove(session)

    async def _remove(self, session: Session) -> None:
        self._registry.remove(session)
        await self._close(session)
        await self._store.delete(session.key)

    async def _close(self, session: Session) -> None:
        session.closed = True
        runs = session.open_runs()
        for run in reversed(runs):
            await self.driver.cancel(run, "none")
        for run in runs:
            await run.handle.result()
        self.driver.release(session)

    async def transcript(self, principal: str, session_id: str, style: str) -> Answer:
        """Return the history as items, openai, anthropic or tokens."""
        return transcript(self._registry.get(principal, session_id), style)

    # For the dialects, which send whole conversations

    def look(self, principal: str, session_id: str) -> Session:
        """Return an open session, to be read only. Raises SessionNotFound, SessionClosed."""
        return self._registry.open(principal, session_id)

    async def reprofile(self, principal: str, session_id: str, request: CreateRequest) -> None:
        """Change what a session's prompt begins with: system text, tools, template options."""
        await self._heads.reprofile(self._registry.open(principal, session_id), request)

    async def measure(
        self, principal: str, request: CreateRequest, turn: CountRequest
    ) -> CountAnswer:
        """Count the tokens of a session that is not created, and of a turn in it."""
        await asyncio.to_thread(check_tools, request.tools)
        _ = self.driver.info
        session = self._registry.new(principal, None, self._profile(request))
        if request.history:
            self._heads.import_into(session, request.history)
        return await self._heads.count(session, turn)

    # Turns

    async def start_turn(self, principal: str, session_id: str, request: TurnRequest) -> TurnHandle:
        """Accept a turn and return its handle; raises what refuses it before it is accepted."""
        session = self._registry.open(principal, session_id)
        self.driver.require_engine()
        if request.when_busy == "reject":
            session.require_idle()
        turn_id = session.mint_turn()
        now = self._clock.time()
        run = TurnRun(
            number=next(self.driver.numbers),
            id=turn_id,
            session=session,
            request=request,
            handle=TurnHandle(turn_id, self._clock),
            accepted_at=self._clock.monotonic(),
            now_ms=int(now * 1000),
        )
        await self.driver.accept(run)
        session.last_active = now
        self.driver.waits.turn_came(session, request.hints)
        return run.handle

    def turn_announced(self, principal: str, session_id: str) -> AbstractContextManager[None]:
        """Bring a session's KV back while the request of its next turn is read.

        What raises inside takes it back. Nothing is done where no turn would be taken.
        """
        try:
            session = self._registry.open(principal, session_id)
            self.driver.require_engine()
        except AgentserveError:  # the turn itself meets what is wrong
            return contextlib.nullcontext()
        return self.driver.waits.announced(session)

    async def follow(self, principal: str, session_id: str, turn_id: str) -> TurnHandle:
        """Return the handle of a running turn, or of one that ended."""
        session = self._registry.get(principal, session_id)
        if handle := session.handles.get(turn_id):
            return handle
        return finished_handle(await self._turn(session, turn_id), self._clock)

    async def cancel(self, principal: str, session_id: str, request: CancelRequest) -> Turn:
        """End the running turn (or the named one) and return it; idempotent.

        What was prefilled ahead of a turn is given up; staged results stay.
        """
        session = self._registry.open(principal, session_id)
        self.driver.discard_ahead(session)
        for run in session.open_runs():
            if request.turn in (None, run.id):
                await self.driver.cancel(run, request.keep)
                return await run.handle.result()
        turn_id = request.turn or next(reversed(session.handles), None) or session.head_id
        if turn_id is None:
            raise TurnNotFound("the session has no turn yet", param="turn")
        return await self._turn(session, turn_id)

    async def turns(self, principal: str, session_id: str) -> TurnList:
        """Return the turns of the head's history, oldest first."""
        session = self._registry.get(principal, session_id)
        return TurnList(records.turns(session, self.driver.info.max_context))

    async def turn(self, principal: str, session_id: str, turn_id: str) -> Turn:
        """Return one turn, on any branch that was not pruned."""
        return await self._turn(self._registry.get(principal, session_id), turn_id)

    async def _turn(self, session: Session, turn_id: str) -> Turn:
        return await records.turn(session, turn_id, self._store, self.driver.info.max_context)

    async def tool_results(
        self, principal: str, session_id: str, request: ToolResultsRequest
    ) -> ToolResultsAnswer:
        """Stage results; generates nothing. The same body twice is fine.

        The longest run of results in call order is prefilled while the other tools run.
        `prefilled_tokens` counts the tokens that this call added to what the engine has of the
        session, or is computing; the next turn finds them cached.
        """
        session = self._registry.open(principal, session_id)
        new = session.new_results(request.results)
        if new:
            record = msgspec.json.encode([*session.staged.values(), *new.values()])
            session.staged.update(new)
            try:
                await self._store.commit(session.key, "staged", record)
            except BaseException:
                for call_id in new:
                    session.staged.pop(call_id, None)
                raise
        session.last_active = self._clock.time()
        calls = session.callable_now()
        missing = [call.wire() for call in session.unanswered(calls)]
        staged = [call.call_id for call in calls if call.call_id in session.staged]
        prefilled = self.driver.prefill_staged(session)
        if new:
            self.driver.waits.results_came(session)
        return ToolResultsAnswer(missing, staged, prefilled)

    async def hints(self, principal: str, session_id: str, hints: Hints) -> None:
        """Keep what the client knows about this wait, or the next if a turn runs; tell the engine.

        With `close`, until other hints come: the session is closed like DELETE does with
        keep=transcript, now or when a turn commits, once nothing runs, waits or is pending.
        """
        session = self._registry.open(principal, session_id)
        self.driver.waits.said(session, hints)
        if session.running is None and session.ends_here():
            await self._close(session)

    # Moves of the head

    async def history(self, principal: str, session_id: str, request: HistoryRequest) -> HeadAnswer:
        """Replace the history; with `prefill` the answer comes when its KV is computed."""
        session = self._registry.open(principal, session_id)
        answer = await self._heads.history(session, request)
        self.driver.waits.begin(session)
        head = session.head
        wanted = head is not None and head.kv_length < head.length and not head.pending
        if request.prefill and wanted:
            prefill = TurnRequest(input=[], max_output_tokens=0)
            handle = await self.start_turn(principal, session_id, prefill)
            await handle.result()
        return answer

    async def rollback(
        self, principal: str, session_id: str, request: RollbackRequest
    ) -> HeadAnswer:
        """Move the head back."""
        session = self._registry.open(principal, session_id)
        answer = await self._heads.rollback(session, request)
        self.driver.waits.begin(session)
        return answer

    async def fork(self, principal: str, session_id: str, request: ForkRequest) -> ForkAnswer:
        """Copy a session at its head or an older turn; KV is shared copy on write."""
        forks = await self._heads.fork(self._registry.open(principal, session_id), request)
        for fork in forks:
            self.driver.waits.begin(fork)
        return ForkAnswer([self._info(fork) for fork in forks])

    async def count(self, principal: str, session_id: str, request: CountRequest) -> CountAnswer:
        """Return what a turn with this input would feed; runs nothing."""
        return await self._heads.count(self._registry.open(principal, session_id), request)
