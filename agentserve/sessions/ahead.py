"""Prefill of staged results while other tools still run (API.md rule 3).

Nothing that is computed here moves a head: the engine's copy of the sequence grows, the mirror
follows it, and the next turn keeps what its prompt shares with that copy. So a discarded prefill
leaves only KV that nobody refers to.
"""

import itertools
import logging
from array import array
from collections.abc import Iterator

from agentserve.engine.messages import (
    Cancel,
    EngineLink,
    Finished,
    Progress,
    Refused,
    Started,
    Tokens,
)
from agentserve.engine.plan import RunnerInfo, SamplingParams
from agentserve.sessions.items import result_message
from agentserve.sessions.mirror import Ahead, SubmitOptions
from agentserve.sessions.prompt import Fed, compose, fits
from agentserve.sessions.session import Session
from agentserve.sessions.text import ModelText
from agentserve.sessions.tree import common_prefix
from agentserve.wire import Recomputed, ToolResultItem

log = logging.getLogger("agentserve.turns")

_PREFILL = SubmitOptions(max_tokens=0, stop_ids=[], sampling=SamplingParams())


def staged_log(session: Session, text: ModelText) -> "array[int] | None":
    """Return the log that the next turn has in any case, given the results staged so far.

    It ends where the render of the results up to the first missing one stops depending on what
    follows: another result, or the generation. None without a result for the first call.
    """
    calls = session.pending()
    ready = list(itertools.takewhile(lambda call: call.call_id in session.staged, calls))
    if not ready:
        return None
    known = tuple(result_message(session.staged[call.call_id], call) for call in ready)
    more = known
    for call in calls[len(ready) : len(ready) + 1]:
        more += (result_message(ToolResultItem(call.call_id, output="."), call),)
    ends = compose(session, text, Fed((), known), generates=False).log
    goes_on = compose(session, text, Fed((), more), generates=more is known).log
    return ends[: common_prefix(ends, goes_on)]


class PrefillAhead:
    """The provisional prefills of all sessions; at most one of a session is in flight."""

    def __init__(self, link: EngineLink, text: ModelText, numbers: Iterator[int]) -> None:
        self._link = link
        self._text = text
        self._numbers = numbers
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def extend(self, session: Session, info: RunnerInfo) -> int:
        """Prefill what is staged; return the tokens by which that extends the engine's copy."""
        wanted = staged_log(session, self._text)
        if wanted is None or not fits(len(wanted), info):
            return 0
        ahead = session.ahead
        held = common_prefix(session.mirror.tokens, wanted)
        if ahead.turn:
            held = max(held, common_prefix(ahead.wanted, wanted))
        if held < len(wanted):
            ahead.wanted = wanted
            if not ahead.turn:
                self._submit(session)
        return len(wanted) - held

    def _submit(self, session: Session) -> None:
        ahead = session.ahead
        ahead.turn, ahead.reported = next(self._numbers), 0
        ahead.restarted = ahead.restarted or session.mirror.lost
        self._sessions[ahead.turn] = session
        self._link.send(session.mirror.submit(ahead.turn, ahead.wanted, _PREFILL))

    def on_event(self, event: Started | Progress | Tokens | Finished | Refused) -> Session | None:
        """Take an event; return the session whose prefill ended with it."""
        session = self._sessions.get(event.turn)
        if session is None:
            return None
        ahead, mirror = session.ahead, session.mirror
        if isinstance(event, Started) and event.lost:
            ahead.lost.append(Recomputed(event.lost, event.reason))
        if isinstance(event, Progress):
            ahead.computed += event.done - ahead.reported
            ahead.reported = event.done
        if not isinstance(event, Finished | Refused):
            return None
        del self._sessions[event.turn]
        ahead.turn = 0
        if isinstance(event, Finished):
            ahead.preempted += event.recomputed
            if not session.closed:
                mirror.settle(event.log_length, event.kv_length)
            failed = event.reason == "error"
        else:
            failed = True
            mirror.refused()
            if event.code == "unknown_sequence":
                mirror.forget()
        if failed:
            log.warning("session=%s prefill ahead failed: %s", session.id, event.message)
            session.ahead = Ahead()
        return session

    def go_on(self, session: Session) -> None:
        """Prefill what was staged while the prefill that just ended was running."""
        wanted = session.ahead.wanted
        if not session.ahead.turn and common_prefix(session.mirror.tokens, wanted) < len(wanted):
            self._submit(session)

    def stop(self, session: Session) -> bool:
        """Make way for a turn; return whether it has to wait for the end of a prefill."""
        if session.ahead.turn:
            self._link.send(Cancel(session.ahead.turn))
        return bool(session.ahead.turn)

    def discard(self, session: Session) -> None:
        """Stop and forget what was prefilled: the head moves away from it."""
        self.stop(session)
        session.ahead = Ahead(turn=session.ahead.turn, reported=session.ahead.reported)

    def lose(self) -> None:
        """Forget everything with the engine that ran it."""
        for session in self._sessions.values():
            session.ahead = Ahead()
        self._sessions.clear()
