"""The server's side of the engine seam: starts turns, feeds them events, ends them."""

import itertools
import logging
from collections.abc import Sequence

import msgspec

from agentserve.clock import Clock
from agentserve.config import ServerSettings
from agentserve.engine.messages import (
    Cancel,
    Close,
    Down,
    EngineLink,
    Event,
    Finished,
    Inspected,
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
    Draining,
    EngineDown,
    EngineError,
    ModelLoading,
    Overloaded,
)
from agentserve.sessions.ahead import PrefillAhead
from agentserve.sessions.commit import TurnCommitter
from agentserve.sessions.prepare import TurnPreparer
from agentserve.sessions.prepared import PreparedHistory
from agentserve.sessions.refusals import as_refusal, failure, refusal
from agentserve.sessions.residency import ResidencyBoard
from agentserve.sessions.session import Session
from agentserve.sessions.store import Store
from agentserve.sessions.turn import Outcome, TurnRun
from agentserve.sessions.waits import Waits, copy_lead_s
from agentserve.wire import TurnQueued

log = logging.getLogger("agentserve.turns")

HEARTBEAT_S = 10.0  # the engine speaks at least once a second


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
        self.numbers = itertools.count(1)  # of turns at the engine seam
        self.sequences = itertools.count(1)
        self.commits = TurnCommitter(preparer.text, store, clock, lambda: self.info)
        self.waits = Waits(link, clock, lambda one: copy_lead_s(one, self.info, self.stats))
        self.board = ResidencyBoard(link)
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
        self._ahead = PrefillAhead(link, preparer.text, self.numbers)
        counters = (self.numbers, self.sequences)
        self._prepared = PreparedHistory(link, preparer.text, counters, settings.prepared_prefills)

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
        """Read the engine's events for as long as the service lives.

        An event that cannot be handled is logged and ends at most its own turn. When the engine
        can be read no more, every open turn ends with engine_error and /ready says so.
        """
        try:
            while True:
                for event in await self._link.receive():
                    await self.on_event(event)
        except Exception as error:
            self._down = f"its events can no longer be read: {type(error).__name__}"
            await self._fail_all(EngineError(f"the engine was lost: {self._down}"))
            raise

    async def on_event(self, event: Event) -> None:
        """Take one event of the engine. Never raises."""
        self._heard = self._clock.monotonic()
        try:
            if isinstance(event, Ready):
                self._on_ready(event)
            elif isinstance(event, Down):
                await self._on_down(event)
            elif isinstance(event, Stats):
                self.stats = event
            elif isinstance(event, Inspected):
                self.board.on_inspected(event)
            elif run := self._runs.get(event.turn):
                await self._on_turn_event(run, event)
            elif session := self._ahead.on_event(event) or self._prepared.on_event(event):
                await self._resume(session)
        except Exception:
            log.exception("an event of the engine could not be handled: %s", type(event).__name__)

    def _on_ready(self, event: Ready) -> None:
        self.commits.counters.engine_restarts += self._info is not None
        self._info, self.incarnation, self._down = event.info, event.incarnation, None

    async def _on_down(self, event: Down) -> None:
        self._down = event.reason
        self.incarnation += 1
        await self._fail_all(EngineDown(f"the engine died: {event.reason}"))

    async def _fail_all(self, error: AgentserveError) -> None:
        self._ahead.lose()
        self._prepared.lose()
        for run in list(self._runs.values()):
            await self._end_safely(run, None, error)

    async def _on_turn_event(
        self, run: TurnRun, event: Started | Progress | Tokens | Finished | Refused
    ) -> None:
        try:
            if isinstance(event, Started):
                run.on_started(event)
            elif isinstance(event, Progress):
                run.on_progress(event)
            elif isinstance(event, Tokens):
                run.session.mirror.tokens.extend(event.tokens)
                if run.on_tokens(event, self._clock.monotonic()):
                    self._link.send(Cancel(run.number))
            elif isinstance(event, Finished):
                if event.reason == "cancelled" and event.log_length < len(run.prompt.log):
                    run.session.mirror.refused()  # it still waited for its grammar
                else:
                    run.session.mirror.settle(event.log_length, event.kv_length)
                error = failure(run, event.message) if event.reason == "error" else None
                await self._end(run, event, error)
            else:
                await self._on_refused(run, event)
        except Exception:
            await self._abandon(run)

    async def _abandon(self, run: TurnRun) -> None:
        """End a turn that the server itself failed; every other turn goes on."""
        session = run.session
        log.exception("session=%s turn=%s fault=server", session.id, run.id)
        session.mirror.forget()
        self._runs.pop(run.number, None)
        try:
            self._link.send(Cancel(run.number))
            await self.commits.abandon(run)
        finally:
            await self._free(session)

    async def _on_refused(self, run: TurnRun, event: Refused) -> None:
        mirror = run.session.mirror
        if event.code == "unknown_sequence" and not run.resubmitted:
            mirror.forget()
            run.resubmitted = run.restarted = True
            self._submit(run)
            return
        mirror.refused()
        await self._end(run, None, refusal(run, event))

    async def accept(self, run: TurnRun) -> None:
        """Run the turn now, or after the one that runs. Raises what refuses it; nothing changes.

        Everything that the server can know is refused here: parameters, context_full and
        exceeds_kv_capacity (from RunnerInfo), overloaded (from its own count of open turns). The
        engine's own word is not waited for, since it comes with the next step. What it still
        refuses, such as a schema that its grammar compiler cannot take, is a turn that was
        accepted and failed: status `failed`, with the code that the error would have had.
        """
        session = run.session
        if session.running is not None or session.queue:
            await self._enqueue(run)
            return
        self.preparer.prepare(run)
        session.running = run
        try:
            await self._store.accept(session.key, run.id, msgspec.json.encode(run.request))
        except BaseException as error:
            session.running = None
            self.commits.refuse(run, as_refusal(error))
            await self.advance(session)
            raise
        session.keep_handle(run.handle)
        await self._launch(run)

    async def _enqueue(self, run: TurnRun) -> None:
        session = run.session
        self._queued[run.number] = run
        try:
            await self._store.accept(session.key, run.id, msgspec.json.encode(run.request))
        except BaseException as error:
            del self._queued[run.number]
            self.commits.refuse(run, as_refusal(error))
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
            session.running = run
            try:
                if session.closed or self._down is not None:
                    raise EngineDown("the turn could not be started")
                self.preparer.prepare(run)
            except AgentserveError as error:
                await self._end_safely(run, None, error)
            except Exception:
                await self._abandon(run)
            else:
                await self._launch(run)

    async def _launch(self, run: TurnRun) -> None:
        """Submit the turn, or let the end of a prefill ahead do it: one runs in a sequence."""
        session = run.session
        if run.cancel is not None or session.closed or self._down is not None:
            error = None if self._down is None else EngineDown("the engine died")
            run.cancel = run.cancel or "none"
            await self._end_safely(run, None, error)
            return
        self._runs[run.number] = run
        if self._ahead.stop(session) or self._prepared.stop(session, run.prompt.log):
            return
        run.prepared = self._prepared.take(session, run.prompt.log, self.incarnation)
        run.ahead = session.ahead.take(run.prompt.log)
        run.restarted = session.mirror.lost or run.ahead.restarted
        try:
            self._submit(run)
            run.open_output()
        except Exception:
            await self._abandon(run)

    def _submit(self, run: TurnRun) -> None:
        assert run.options is not None
        run.submitted = True
        self._link.send(run.session.mirror.submit(run.number, run.prompt.log, run.options))
        run.held = run.session.mirror.kv_length

    async def _resume(self, session: Session) -> None:
        """Go on after a prefill ahead has ended: with the turn that waited, or with more of it."""
        run = session.running
        if run is None:
            self.waits.tell(session, again=True)
            if self._may_prefill(session):
                self._ahead.go_on(session)
        elif run.number in self._runs and not run.submitted:
            await self._launch(run)

    def _may_prefill(self, session: Session) -> bool:
        return session.idle and self._room() is not None

    def _room(self) -> tuple[RunnerInfo, int] | None:
        """Return the engine and its incarnation, unless it would take no prefill now."""
        up = self._down is None and not self.draining
        open_turns = self.open_turns + len(self._ahead) + len(self._prepared)
        if self._info is None or not up or open_turns >= self._settings.max_open_turns:
            return None
        return self._info, self.incarnation

    def prefill_staged(self, session: Session) -> int:
        """Prefill the staged results of an idle session; return the tokens handed to the engine.

        Tokens that the engine was handed before, by a turn or by an earlier call, do not count. 0
        too when there is no room, or when something fails: the turn will meet it and say so.
        """
        if not session.staged or not self._may_prefill(session):
            return 0
        session.mirror.sync(self.incarnation)
        try:
            return self._ahead.extend(session, self.info)
        except Exception:
            log.exception("session=%s: staged results were not prefilled", session.id)
            return 0

    def discard_ahead(self, session: Session) -> None:
        """Stop prefilling ahead of a turn; what was staged stays staged."""
        self._ahead.discard(session)
        self._prepared.close(session)

    def release(self, session: Session) -> None:
        """Close a session of which no turn is open, and free what the engine holds of it."""
        session.closed = True
        session.staged.clear()
        self.discard_ahead(session)
        self._link.send(Close(session.mirror.sequence))
        session.mirror.forget()

    async def cancel(self, run: TurnRun, keep: str) -> None:
        """Ask the turn to end; the first request decides what is kept."""
        if run.cancel is not None or run.ending:
            return
        run.cancel = keep  # type: ignore[assignment]
        if run in run.session.queue:
            run.session.queue.remove(run)
            del self._queued[run.number]
            run.cancel = "none"
            await self.commits.end(run, Outcome("cancelled", "cancelled", "none"), None)
        elif run.submitted:
            self._link.send(Cancel(run.number))

    async def locate(self, sessions: Sequence[Session]) -> None:
        """Bring up to date where the KV of these sessions is, in at most a second."""
        for session in sessions:
            session.mirror.sync(self.incarnation)
        await self.board.refresh([session.mirror for session in sessions])

    async def sweep(self) -> None:
        """Cancel the turns whose readers are gone for too long; bring back and prepare KV."""
        self.waits.sweep()
        now = self._clock.monotonic()
        for run in [*self._runs.values(), *self._queued.values()]:
            left = run.handle.left_at
            gone = left is not None and now - left >= self._settings.disconnect_grace_s
            if gone and run.request.on_disconnect == "cancel":
                await self.cancel(run, "none")
        await self._prepared.start(self._room)

    async def _end_safely(
        self, run: TurnRun, finished: Finished | None, error: AgentserveError | None
    ) -> None:
        try:
            await self._end(run, finished, error)
        except Exception:
            await self._abandon(run)

    async def _end(
        self, run: TurnRun, finished: Finished | None, error: AgentserveError | None
    ) -> None:
        run.ending = True
        self._runs.pop(run.number, None)
        outcome = run.close_output(run.decide(finished, error), finished)
        run.count(finished)
        await self.commits.end(run, outcome, finished)
        if outcome.stop_reason == "end":
            self._prepared.want(run.session)
        await self._free(run.session)

    async def _free(self, session: Session) -> None:
        """Let the next turn of the session run, or prefill what was staged for it."""
        session.running = None
        session.drop_staged()
        await self.advance(session)
        if session.closed and not session.open_runs():
            self.release(session)
        self.waits.begin(session)
        self.prefill_staged(session)
