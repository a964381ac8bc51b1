"""The server's side of the engine seam: starts turns, feeds them events, commits how they end."""

import logging
from array import array
from collections.abc import Callable

import msgspec

from agentserve.clock import Clock
from agentserve.config import ServerSettings
from agentserve.engine.messages import (
    Cancel,
    Down,
    EngineLink,
    Event,
    Finished,
    Progress,
    Ready,
    Refused,
    Started,
    Stats,
    Tokens,
)
from agentserve.engine.plan import RunnerInfo
from agentserve.errors import (
    AgentserveError,
    ContextFull,
    Draining,
    EngineDown,
    EngineError,
    ExceedsKvCapacity,
    InvalidRequest,
    ModelLoading,
    Overloaded,
    StoreFull,
)
from agentserve.sessions.accounting import Counters, log_line
from agentserve.sessions.prepare import TurnPreparer
from agentserve.sessions.prompt import compose
from agentserve.sessions.records import CommitRecord
from agentserve.sessions.session import Session
from agentserve.sessions.store import Store
from agentserve.sessions.tree import TurnNode
from agentserve.sessions.turn import Outcome, TurnRun
from agentserve.wire import Context, ErrorEvent, Turn, TurnDone, TurnQueued, error_body

log = logging.getLogger("agentserve.turns")

HEARTBEAT_S = 10.0  # the engine speaks at least once a second
_REFUSALS: dict[str, type[AgentserveError]] = {
    "context_full": ContextFull,
    "exceeds_kv_capacity": ExceedsKvCapacity,
    "overloaded": Overloaded,
    "bad_grammar": InvalidRequest,
}


class TurnDriver:
    """Owns every turn between acceptance and commit. All state changes happen on one event loop."""

    def __init__(
        self,
        link: EngineLink,
        preparer: TurnPreparer,
        store: Store,
        settings: ServerSettings,
        clock: Clock,
    ) -> None:
        self.preparer = preparer
        self.counters = Counters()
        self.observers: list[Callable[[Turn], None]] = []  # told of every turn that ended
        self.stats: Stats | None = None
        self.draining = False
        self.incarnation = 0
        self._link = link
        self._store = store
        self._settings = settings
        self._clock = clock
        self._info: RunnerInfo | None = None
        self._down: str | None = None
        self._heard = clock.monotonic()
        self._runs: dict[int, TurnRun] = {}
        self._queued: dict[int, TurnRun] = {}

    @property
    def info(self) -> RunnerInfo:
        """What the engine runs. Raises ModelLoading before it has said so."""
        if self._info is None:
            raise ModelLoading("the model is still being loaded")
        return self._info

    @property
    def open_turns(self) -> int:
        """Turns that have not ended."""
        return len(self._runs) + len(self._queued)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine was last heard."""
        return self._clock.monotonic() - self._heard

    def ready(self) -> tuple[bool, str]:
        """Return whether turns are taken, and if not, why."""
        if self._down is not None:
            return False, f"engine down: {self._down}"
        if self._info is None:
            return False, "model loading"
        if self.draining:
            return False, "draining"
        silent = self.heartbeat_age_s
        if silent > HEARTBEAT_S:
            return False, f"the engine has been silent for {silent:.0f} s"
        return True, "ready"

    def require_engine(self) -> None:
        """Raise Draining, EngineDown, ModelLoading or Overloaded when no turn can be taken."""
        if self.draining:
            raise Draining("the server is shutting down")
        if self._down is not None:
            raise EngineDown(f"the engine is being restarted: {self._down}")
        if self.open_turns >= self._settings.max_open_turns:
            raise Overloaded(f"{self.open_turns} turns are open; try again later")
        _ = self.info

    async def pump(self) -> None:
        """Read the engine's events for as long as the service lives."""
        while True:
            for event in await self._link.receive():
                await self.on_event(event)

    async def on_event(self, event: Event) -> None:
        """Take one event of the engine."""
        self._heard = self._clock.monotonic()
        if isinstance(event, Ready):
            self._on_ready(event)
        elif isinstance(event, Down):
            await self._on_down(event)
        elif isinstance(event, Stats):
            self.stats = event
        elif run := self._runs.get(event.turn):
            try:
                await self._on_turn_event(run, event)
            except Exception:
                log.exception("session=%s turn=%s fault=server", run.session.id, run.id)
                await self._abandon(run)

    async def _abandon(self, run: TurnRun) -> None:
        """End a turn that the server itself failed; every other turn goes on."""
        session = run.session
        self._link.send(Cancel(run.number))
        session.mirror.forget()
        self._runs.pop(run.number, None)
        self._refuse(run, EngineError("the server failed this turn"))
        await self._store.forget(session.key, run.id)
        session.running = None
        await self.advance(session)

    def _on_ready(self, event: Ready) -> None:
        self.counters.engine_restarts += self._info is not None
        self._info, self.incarnation, self._down = event.info, event.incarnation, None

    async def _on_down(self, event: Down) -> None:
        self._down = event.reason
        self.incarnation += 1
        error = EngineDown(f"the engine died: {event.reason}")
        for run in list(self._runs.values()):
            await self._end(run, None, error)

    async def _on_turn_event(
        self, run: TurnRun, event: Started | Progress | Tokens | Finished | Refused
    ) -> None:
        if isinstance(event, Started):
            run.on_started(event)
        elif isinstance(event, Progress):
            run.on_progress(event)
        elif isinstance(event, Tokens):
            run.session.mirror.tokens.extend(event.tokens)
            if run.on_tokens(event, self._clock.monotonic()):
                self._link.send(Cancel(run.number))
        elif isinstance(event, Finished):
            run.session.mirror.settle(event.log_length, event.kv_length)
            error = EngineError(event.message) if event.reason == "error" else None
            await self._end(run, event, error)
        else:
            await self._on_refused(run, event)

    async def _on_refused(self, run: TurnRun, event: Refused) -> None:
        mirror = run.session.mirror
        if event.code == "unknown_sequence" and not run.resubmitted:
            mirror.forget()
            run.resubmitted = run.restarted = True
            self._submit(run)
            return
        mirror.refused()
        error = _REFUSALS.get(event.code, EngineError)(event.message)
        await self._end(run, None, error)

    async def accept(self, run: TurnRun) -> None:
        """Run the turn now, or after the one that runs. Raises what refuses it; nothing changes."""
        session = run.session
        if session.running is not None or session.queue:
            await self._enqueue(run)
            return
        self.preparer.prepare(run)
        session.running = run
        try:
            await self._store.accept(session.key, run.id, msgspec.msgpack.encode(run.request))
        except StoreFull as full:
            session.running = None
            self._refuse(run, full)
            await self.advance(session)
            raise
        session.keep_handle(run.handle)
        await self._launch(run)

    def _refuse(self, run: TurnRun, error: AgentserveError) -> None:
        """End the handle of a turn that left no record, for whoever waits on it."""
        if not run.handle.done:
            outcome = Outcome("failed", None, "none", error)
            turn = run.turn(outcome, self._context(run.session, None))
            run.handle.end(turn, ErrorEvent(error_body(error)))

    async def _enqueue(self, run: TurnRun) -> None:
        session = run.session
        self._queued[run.number] = run
        try:
            await self._store.accept(session.key, run.id, msgspec.msgpack.encode(run.request))
        except StoreFull as full:
            del self._queued[run.number]
            self._refuse(run, full)
            raise
        session.keep_handle(run.handle)
        if run.request.when_busy == "interrupt":
            session.queue.appendleft(run)
            if session.running is not None:
                await self.cancel(session.running, "none")
        else:
            session.queue.append(run)
        run.handle.publish(TurnQueued(session.queue.index(run) + 1))
        await self.advance(session)

    async def advance(self, session: Session) -> None:
        """Start the next queued turn of an idle session; one that no longer fits fails."""
        while session.queue and session.running is None:
            run = session.queue.popleft()
            del self._queued[run.number]
            try:
                if session.closed or self._down is not None:
                    raise EngineDown("the turn could not be started")
                self.preparer.prepare(run)
            except AgentserveError as error:
                session.running = run
                await self._end(run, None, error)
                continue
            session.running = run
            await self._launch(run)

    async def _launch(self, run: TurnRun) -> None:
        if run.cancel is not None or run.session.closed or self._down is not None:
            error = EngineDown("the engine died") if self._down is not None else None
            run.cancel = run.cancel or "none"
            await self._end(run, None, error)
            return
        self._runs[run.number] = run
        mirror = run.session.mirror
        mirror.sync(self.incarnation)
        run.restarted = mirror.lost
        self._submit(run)

    def _submit(self, run: TurnRun) -> None:
        assert run.options is not None
        run.submitted = True
        self._link.send(run.session.mirror.submit(run.number, run.prompt.log, run.options))

    async def cancel(self, run: TurnRun, keep: str) -> None:
        """Ask the turn to end; the first request decides what is kept."""
        if run.cancel is not None or run.ending:
            return
        run.cancel = keep  # type: ignore[assignment]
        if run in run.session.queue:
            run.session.queue.remove(run)
            del self._queued[run.number]
            run.cancel = "none"
            await self._finish(run, Outcome("cancelled", "cancelled", "none"), None)
        elif run.submitted:
            self._link.send(Cancel(run.number))

    async def sweep(self) -> None:
        """Cancel the turns whose readers have been gone for longer than the grace period."""
        now = self._clock.monotonic()
        for run in [*self._runs.values(), *self._queued.values()]:
            left = run.handle.left_at
            gone = left is not None and now - left >= self._settings.disconnect_grace_s
            if gone and run.request.on_disconnect == "cancel":
                await self.cancel(run, "none")

    async def _end(
        self, run: TurnRun, finished: Finished | None, error: AgentserveError | None
    ) -> None:
        run.ending = True
        self._runs.pop(run.number, None)
        outcome = run.close_output(run.decide(finished, error), finished)
        run.count(finished)
        if outcome.keep == "none":
            for call in run.sent_calls():
                run.session.staged.pop(call.call_id, None)
        outcome = await self._finish(run, outcome, finished)
        run.session.running = None
        await self.advance(run.session)

    async def _finish(self, run: TurnRun, outcome: Outcome, finished: Finished | None) -> Outcome:
        """Write how the turn ended, move the head, and only then tell the readers."""
        session = run.session
        node, tokens = self._node(run, outcome, finished)
        run.timing.total = round((self._clock.monotonic() - run.accepted_at) * 1000)
        turn = run.turn(outcome, self._context(session, node))
        sampling = run.options.sampling if run.options is not None else None
        record = msgspec.msgpack.encode(CommitRecord(turn, node, sampling))
        try:
            await self._store.commit(session.key, run.id, record)
        except StoreFull as full:
            node, outcome = None, Outcome("failed", None, "none", full)
            turn = run.turn(outcome, self._context(session, None))
        dropped: list[str] = []
        if node is not None:
            dropped = session.tree.add(node.with_turn(turn), tokens)
            session.drop_staged()
            session.last_active = self._clock.time()
        if node is None or node.id != run.id:
            dropped += session.lose(run.id)
        for old in dropped:
            await self._store.forget(session.key, old)
        session.add_usage(turn.usage)
        self.counters.add(turn)
        log.info("%s", log_line(turn))
        for observe in self.observers:
            observe(turn)
        failed = turn.status == "failed" and turn.error is not None
        run.handle.end(turn, ErrorEvent(turn.error) if failed else TurnDone(turn))  # type: ignore[arg-type]
        return outcome

    def _node(
        self, run: TurnRun, outcome: Outcome, finished: Finished | None
    ) -> tuple[TurnNode | None, "array[int] | None"]:
        if outcome.keep == "none":
            return None, None
        computed = finished.kv_length if finished is not None else 0
        if outcome.keep != "input":
            if finished is None:
                computed = len(run.prompt.log) + max(0, len(run.generated) - 1)
            return run.node(outcome, computed)
        if not run.fed.messages:
            return run.prefilled_head(computed), None
        kept = run.prompt.log
        if not run.prefills_only:
            kept = compose(run.session, self.preparer.text, run.fed, generates=False).log
        return run.input_node(kept, computed), kept

    def _context(self, session: Session, node: TurnNode | None) -> Context:
        limit = self.info.max_context
        if node is None:
            return session.context(limit)
        return Context(node.length, limit, max(0, limit - node.length))
