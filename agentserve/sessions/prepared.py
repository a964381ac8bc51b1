"""Prefill of the history that a template rewrites at the next user message, before that comes.

Once a turn ended with an answer, the next one is asked by a user; a template that then drops the
reasoning of earlier turns leaves little of the log's prefix, but what the new log will be is known
up to the message. It is computed in a second sequence, beside the old KV, and the next turn goes on
in the one that has more of its prompt. Nothing here moves a head.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator

import msgspec

from agentserve.engine.messages import (
    Cancel,
    Close,
    EngineLink,
    Finished,
    Progress,
    Refused,
    Started,
    Tokens,
)
from agentserve.engine.plan import RunnerInfo, SamplingParams
from agentserve.sessions.conversation import Conversation, Message
from agentserve.sessions.mirror import Mirror, Prepared, SubmitOptions
from agentserve.sessions.prompt import Fed, fits, rewritten
from agentserve.sessions.session import Session
from agentserve.sessions.text import ModelText
from agentserve.sessions.tree import common_prefix

log = logging.getLogger("agentserve.turns")

Engine = Callable[[], tuple[RunnerInfo, int] | None]

LEAST = 32  # tokens; fewer are computed with the user's message in about the same time
_ASKED = ("Yes", "1")  # two messages that share no token
_PREFILL = SubmitOptions(max_tokens=0, stop_ids=[], sampling=SamplingParams(), background=True)


async def rewritten_log(session: Session, text: ModelText) -> "array[int] | None":
    """Return the log that the next user message gives, as far as it does not depend on the message.

    None when the log only grows then, or when something other than a user message comes next. The
    history is rendered in a thread: that takes a tenth of a second for tens of thousands of tokens.
    """
    head = session.head
    if head is None or head.pending or session.profile.on_template_rewrite == "keep":
        return None
    asked = [Fed((), (Message(role="user", text=said),)) for said in _ASKED]
    first = rewritten(session, text, asked[0])
    if first is None:
        return None
    messages = (*first.messages[:-1], *asked[1].messages)
    second = msgspec.structs.replace(first, messages=messages)
    log = session.tree.log(head)
    known = await asyncio.to_thread(_common, text, first, second)
    return known if common_prefix(known, log) < len(log) else None


def _common(text: ModelText, first: Conversation, second: Conversation) -> "array[int]":
    left, right = (array("i", text.composer.tokens(whole)) for whole in (first, second))
    return left[: common_prefix(left, right)]


class PreparedHistory:
    """The prepared histories of all sessions; at most `limit` are computed at a time."""

    def __init__(
        self,
        link: EngineLink,
        text: ModelText,
        counters: tuple[Iterator[int], Iterator[int]],
        limit: int,
    ) -> None:
        self._link = link
        self._text = text
        self._turns, self._sequences = counters
        self._limit = limit
        self._candidates: dict[str, Session] = {}
        self._flights: dict[int, tuple[Session, Prepared]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def want(self, session: Session) -> None:
        """Note a session whose turn ended with an answer."""
        if self._limit:
            self._candidates[session.key] = session

    async def start(self, engine: Engine) -> None:
        """Begin with the sessions that still wait for a message, or go on with them.

        `engine` tells of the engine, with its incarnation, unless it would take no prefill now.
        """
        for key, session in list(self._candidates.items()):
            if len(self._flights) >= self._limit:
                return
            if self._candidates.pop(key, None) is None:
                continue  # a turn came while another history was rendered
            try:
                if session.prepared is None:
                    await self._open(session, engine)
                self._submit(session, engine)
            except Exception:
                log.exception("session=%s: the history was not prepared", session.id)
                self.close(session)

    async def _open(self, session: Session, engine: Engine) -> None:
        """Find out what the next message will leave to be computed; open a sequence if it is much.

        Whatever happens to the session meanwhile makes that useless.
        """
        head = session.head
        if not session.idle:
            return
        wanted = await rewritten_log(session, self._text)
        up = engine()
        if wanted is None or up is None or not session.idle or session.head is not head:
            return
        info, incarnation = up
        session.mirror.sync(incarnation)
        if fits(len(wanted), info) and len(wanted) - session.mirror.reach(wanted) >= LEAST:
            session.prepared = Prepared(Mirror(next(self._sequences), session.principal), wanted)

    def _submit(self, session: Session, engine: Engine) -> None:
        prepared, up = session.prepared, engine()
        if prepared is None or prepared.turn or up is None:
            return
        prepared.mirror.sync(up[1])
        prepared.turn, prepared.reached, prepared.done = next(self._turns), 0, 0
        self._flights[prepared.turn] = (session, prepared)
        self._link.send(prepared.mirror.submit(prepared.turn, prepared.wanted, _PREFILL))

    def on_event(self, event: Started | Progress | Tokens | Finished | Refused) -> Session | None:
        """Take an event; return the session whose prefill ended with it."""
        if event.turn not in self._flights:
            return None
        session, prepared = self._flights[event.turn]
        if isinstance(event, Started):
            prepared.reached = event.cached
        elif isinstance(event, Progress):
            prepared.reached += event.done - prepared.done
            prepared.computed += event.done - prepared.done
            prepared.done = event.done
        if not isinstance(event, Finished | Refused):
            return None
        del self._flights[event.turn]
        prepared.turn = 0
        if session.prepared is prepared:
            self._settle(session, prepared, event)
        return session

    def _settle(self, session: Session, prepared: Prepared, event: Finished | Refused) -> None:
        """Take what was reached. One that had to make way goes on later, if it got anywhere."""
        if isinstance(event, Refused) or event.reason == "error":
            log.warning("session=%s history not prepared: %s", session.id, event.message)
            self.close(session)
            return
        before = prepared.mirror.kv_length
        prepared.mirror.settle(event.log_length, event.kv_length)
        more = before < event.kv_length < len(prepared.wanted)
        if more and event.reason == "prefilled":
            self._candidates[session.key] = session

    def stop(self, session: Session, log: "array[int]") -> bool:
        """Make way for a turn that feeds `log`; return whether it has to wait for the end."""
        self._candidates.pop(session.key, None)
        prepared = session.prepared
        if prepared is None or not prepared.turn:
            return False
        reached = min(common_prefix(prepared.mirror.tokens, log), prepared.reached)
        if reached <= session.mirror.reach(log):
            self.close(session)
            return False
        self._link.send(Cancel(prepared.turn))
        return True

    def take(self, session: Session, log: "array[int]", incarnation: int) -> range:
        """Let the turn that feeds `log` go on in the sequence that has more of it; close the other.

        Returns the positions that were computed ahead and that the turn finds.
        """
        session.mirror.sync(incarnation)
        prepared, session.prepared = session.prepared, None
        if prepared is None:
            return range(0)
        prepared.mirror.sync(incarnation)
        start, stop = session.mirror.reach(log), prepared.mirror.reach(log)
        if stop > start:
            session.mirror, prepared.mirror = prepared.mirror, session.mirror
        self._link.send(Close(prepared.mirror.sequence))
        return range(max(start, stop - prepared.computed), stop)

    def close(self, session: Session) -> None:
        """Give up what was prepared: the head moves, or the session ends."""
        self._candidates.pop(session.key, None)
        prepared, session.prepared = session.prepared, None
        if prepared is not None:
            self._link.send(Close(prepared.mirror.sequence))

    def lose(self) -> None:
        """Forget what was in flight in an engine that is gone."""
        for session, prepared in self._flights.values():
            if session.prepared is prepared:
                session.prepared = None
        self._flights.clear()
        self._candidates.clear()
