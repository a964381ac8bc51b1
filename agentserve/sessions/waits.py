"""What the engine is told of the wait between two turns: for what, how long, and when it ends.

The server says what a session waits for when a turn has ended, when the client gives hints and
when results are staged. What a client said of a wait holds for that wait; only `close` stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentserve.clock import Clock
from agentserve.engine.messages import EngineLink, Hint, Promote, Stats
from agentserve.engine.plan import RunnerInfo
from agentserve.sessions.toolkeys import tool_key
from agentserve.wire import Hints, ToolCallOut

if TYPE_CHECKING:
    from agentserve.sessions.session import Session
    from agentserve.sessions.tree import Pending

LEAD_S = 0.5  # a promised turn's KV is brought back so much earlier than its copy takes
MAX_LEAD_S = 10.0
ASSUMED_RATE = 4e9  # bytes a second from the host tier, until it was measured
MEASURED_BYTES = 1 << 20  # loads that make a measurement


@dataclass
class Wait:
    """One session's wait. Times are the clock's monotonic seconds."""

    since: float = 0.0  # when it began
    said_at: float = 0.0  # when the client last spoke of it; not before it began
    promote_at: float | None = None  # when the promised turn's KV is to be brought back
    promoted: bool = False  # it was, for a promise
    announced: int = 0  # requests for its next turn that are being read


class Waits:
    """Tells the engine of the waits of all sessions, and brings KV back when one is to end."""

    def __init__(self, link: EngineLink, clock: Clock, lead_s: Callable[[Session], float]) -> None:
        self._link = link
        self._clock = clock
        self._lead_s = lead_s
        self._promised: dict[str, Session] = {}

    def begin(self, session: Session) -> None:
        """Note that the session waits from now on; called when a turn has ended."""
        now = self._clock.monotonic()
        session.wait.since = session.wait.said_at = now
        self.tell(session)

    def said(self, session: Session, hints: Hints) -> None:
        """Take what the client says of this wait, or of the one after the turn that runs."""
        session.hints = hints
        session.wait.said_at = self._clock.monotonic()
        self.tell(session)

    def turn_came(self, session: Session, hints: Hints | None) -> None:
        """Note an accepted turn: the wait is over, and `hints` speak of the one after it."""
        self._forget_promise(session)
        old = session.hints
        if hints is None and old is not None and not session.queue:
            hints = Hints(close=old.close)
        session.hints = hints or old
        if not session.open_runs():  # it has ended already
            self.begin(session)

    def tell(self, session: Session, *, again: bool = False) -> None:
        """Tell the engine what an idle session waits for, and promise what the client promised.

        With `again` less is waited for than before: KV that was sent away once is not sent again.
        """
        if session.closed or session.open_runs() or not session.mirror.tokens:
            return
        self._forget_promise(session)
        pending = session.pending()
        missing = tuple(session.unanswered(pending))
        hints = session.hints or Hints()
        kv = "host" if hints.kv == "disk" else hints.kv  # there is no disk tier yet
        if again and kv in ("host", "drop"):
            kv = "auto"
        expected = 0.0 if pending and not missing else self._expected_s(session, missing)
        keys = list(dict.fromkeys(_keys(session, missing or pending)))
        for sequence in _sequences(session):
            self._link.send(Hint(sequence, keys, expected, kv))
        if hints.resume_in_ms is not None:
            due = session.wait.said_at + hints.resume_in_ms / 1000
            session.wait.promote_at = due - min(MAX_LEAD_S, self._lead_s(session))
            self._promised[session.key] = session

    def _expected_s(self, session: Session, calls: tuple[Pending, ...]) -> float | None:
        """Return the seconds from now until the next turn, as the client and its tools say."""
        now, wait = self._clock.monotonic(), session.wait
        hints = session.hints or Hints()
        said = hints.expected_ms if hints.resume_in_ms is None else hints.resume_in_ms
        if isinstance(said, int):
            return max(0.0, wait.said_at + said / 1000 - now)
        by_call = said or {}
        declared = {tool.name: tool.expected_ms for tool in session.profile.tools}
        ends: list[float] = []
        for call in calls:
            if (own := by_call.get(call.call_id)) is not None:
                ends.append(wait.said_at + own / 1000)
            elif (usual := declared.get(call.name)) is not None:
                ends.append(wait.since + usual / 1000)
        return max(0.0, max(ends) - now) if ends else None

    def results_came(self, session: Session) -> None:
        """Take staged results: fewer calls are waited for, or the next turn is about to come."""
        self.tell(session, again=True)
        answered = bool(session.pending()) and not session.unanswered(session.pending())
        if answered and not session.ahead.turn:  # else the prefill ahead brings its KV back
            self._promote(session)

    @contextmanager
    def announced(self, session: Session) -> Iterator[None]:
        """Bring back the KV for a turn whose request is being read; given up when that raises."""
        session.wait.announced += 1
        if session.wait.announced == 1:
            self._promote(session)
        try:
            yield
        except BaseException:
            if session.wait.announced == 1:
                self._promote(session, begin=False)
            raise
        finally:
            session.wait.announced -= 1

    def sweep(self) -> None:
        """Bring back what was promised for about now."""
        now = self._clock.monotonic()
        for session in list(self._promised.values()):
            due = session.wait.promote_at
            if session.closed or due is None:
                del self._promised[session.key]
            elif due <= now:
                self._forget_promise(session)
                session.wait.promoted = True
                self._promote(session)

    def _forget_promise(self, session: Session) -> None:
        wait = session.wait
        self._promised.pop(session.key, None)
        wait.promote_at = None
        if wait.promoted and not wait.announced:
            self._promote(session, begin=False)
        wait.promoted = False

    def _promote(self, session: Session, *, begin: bool = True) -> None:
        idle = not session.open_runs() and not session.closed
        if idle and session.mirror.kv_length:
            self._link.send(Promote(_sequences(session)[-1], begin))


def copy_lead_s(session: Session, info: RunnerInfo, stats: Stats | None) -> float:
    """Return how long before a promised turn its KV is to be brought back, at most, in seconds.

    The whole of it is reckoned, at the rate that loads have had so far.
    """
    blocks = -(-session.mirror.kv_length // info.block_size)
    size = blocks * sum(group.block_bytes for group in info.groups)
    rate = ASSUMED_RATE
    if stats is not None and stats.loaded_bytes >= MEASURED_BYTES and stats.loaded_s > 0:
        rate = stats.loaded_bytes / stats.loaded_s
    return LEAD_S + 2 * size / rate


def _sequences(session: Session) -> list[int]:
    """Return the engine's sequences of a session; its next turn probably goes on in the last."""
    prepared = session.prepared
    ready = [prepared.mirror.sequence] if prepared is not None and prepared.mirror.tokens else []
    return [session.mirror.sequence, *ready]


def _keys(session: Session, calls: tuple[Pending, ...]) -> Iterator[str]:
    """Yield the key of each call."""
    head = session.head
    entries = (head.entries or session.tree.entries(head)) if head is not None and calls else ()
    output = entries[-1].output if entries else ()
    arguments = {item.call_id: item.arguments for item in output if isinstance(item, ToolCallOut)}
    for call in calls:
        yield tool_key(call.name, arguments.get(call.call_id, {}))
