"""The end of a turn: written to the store, taken by the session, and only then told to readers."""

import asyncio
import logging
from array import array
from collections.abc import Callable

import msgspec

from agentserve.clock import Clock
from agentserve.engine.messages import Finished
from agentserve.engine.plan import RunnerInfo
from agentserve.errors import AgentserveError, EngineError, StoreFull
from agentserve.sessions.accounting import Counters, log_line
from agentserve.sessions.logprobs import told_without
from agentserve.sessions.prompt import compose
from agentserve.sessions.records import CommitRecord
from agentserve.sessions.session import Session
from agentserve.sessions.store import Store
from agentserve.sessions.text import ModelText
from agentserve.sessions.tree import TurnNode
from agentserve.sessions.turn import Outcome, TurnRun
from agentserve.wire import Context, ErrorEvent, Turn, TurnDone, error_body

log = logging.getLogger("agentserve.turns")


class TurnCommitter:
    """Ends turns. What a client is told of one is in the store before."""

    def __init__(
        self, text: ModelText, store: Store, clock: Clock, info: Callable[[], RunnerInfo]
    ) -> None:
        self.counters = Counters()
        self.observers: list[Callable[[Turn], None]] = []  # told of every turn that ended
        self._text = text
        self._store = store
        self._clock = clock
        self._info = info

    async def end(self, run: TurnRun, outcome: Outcome, finished: Finished | None) -> None:
        """Write how the turn ended, move the head and tell the readers.

        A store that cannot take the record fails this turn, and the head stays.
        """
        session = run.session
        node, tokens = self._node(run, outcome, finished)
        run.timing.total = round((self._clock.monotonic() - run.accepted_at) * 1000)
        turn = run.turn(outcome, self._context(session, node))
        try:
            await self._write(run, told_without(turn), node)
        except AgentserveError as error:
            node, outcome = None, Outcome("failed", None, "none", error)
            turn = run.turn(outcome, self._context(session, None))
        dropped: list[str] = []
        if node is not None:
            dropped = session.tree.add(node.with_turn(told_without(turn)), tokens)
            session.last_active = self._clock.time()
            session.closed = session.closed or session.ends_here()
        if node is None or node.id != run.id:
            dropped += session.lose(run.id)
        session.add_usage(turn.usage)
        self.counters.add(turn)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", log_line(turn))
        failed = turn.status == "failed" and turn.error is not None
        run.handle.end(turn, ErrorEvent(turn.error) if failed else TurnDone(turn))  # type: ignore[arg-type]
        if self.observers:  # nobody who waits for the turn waits for them
            asyncio.get_running_loop().call_soon(self._observe, turn)
        for old in dropped:
            await self._store.forget(session.key, old)

    def _observe(self, turn: Turn) -> None:
        for observe in self.observers:
            observe(turn)

    async def _write(self, run: TurnRun, turn: Turn, node: TurnNode | None) -> None:
        sampling = run.options.sampling if run.options is not None else None
        record = msgspec.json.encode(CommitRecord(turn, node, sampling))
        try:
            await self._store.commit(run.session.key, run.id, record)
        except StoreFull:
            raise
        except Exception as error:
            log.exception("session=%s turn=%s fault=store", run.session.id, run.id)
            raise EngineError("the turn could not be stored") from error

    async def abandon(self, run: TurnRun) -> None:
        """End a turn that the server itself failed, unless it has ended already."""
        if run.handle.done:
            return
        self.refuse(run, EngineError("the server failed this turn"))
        await self._store.forget(run.session.key, run.id)

    def refuse(self, run: TurnRun, error: AgentserveError) -> None:
        """End the handle of a turn that left no record, for whoever waits on it."""
        if not run.handle.done:
            outcome = Outcome("failed", None, "none", error)
            turn = run.turn(outcome, self._context(run.session, None))
            run.handle.end(turn, ErrorEvent(error_body(error)))

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
            kept = compose(run.session, self._text, run.fed, generates=False).log
        return run.input_node(kept, computed), kept

    def _context(self, session: Session, node: TurnNode | None) -> Context:
        limit = self._info().max_context
        if node is None:
            return session.context(limit)
        return Context(node.length, limit, max(0, limit - node.length))
