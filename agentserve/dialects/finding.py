"""The longest known part of a conversation, and which of several sessions has it.

Signals only rank sessions that have the same history; the history itself decides.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentserve.dialects import digests
from agentserve.dialects.asked import Asked
from agentserve.dialects.index import Index, Position
from agentserve.dialects.signals import EXPLICIT
from agentserve.errors import SessionClosed, SessionNotFound
from agentserve.sessions.service import SessionService
from agentserve.sessions.session import Session

SIGNALS = (  # the surest first
    EXPLICIT,
    "previous_response",
    "header",
    "metadata",
    "cache_key",
    "call_id",
    "prefix",
    "new",
)
Family = tuple[str, Collection[str]]  # a signal's name, and the sessions that it stands for


@dataclass
class Found:
    """The longest known part of a conversation: `answers` of it, ending at `position`."""

    position: Position
    answers: int
    same_root: bool


def signal_families(
    service: SessionService, index: Index, asked: Asked, base: Position | None
) -> list[Family]:
    """Return the sessions that each signal stands for, the surest signal first.

    The last call id in the conversation that this server minted is a signal, too.
    """
    families: list[Family] = []
    for signal in asked.signals:
        own = (signal.value,) if signal.name == EXPLICIT else ()
        families.append((signal.name, (*own, *index.family((signal.name, signal.value)))))
    if base is not None:
        explicit = sum(signal.name == EXPLICIT for signal in asked.signals)
        families.insert(explicit, ("previous_response", (base.session,)))
    read = service.driver.preparer.call_ids.read
    for segment in reversed(asked.segments):
        calls = [result.call_id for _, result in segment.results]
        calls += [call.call_id for call in segment.answer.calls] if segment.answer else []
        origins = [origin for call in calls if (origin := read(call)) is not None]
        if origins:
            session = index.tagged(origins[-1].session_tag)
            families.append(("call_id", (session,) if session is not None else ()))
        if calls:
            break
    return families


def find(
    service: SessionService,
    index: Index,
    asked: Asked,
    links: digests.Chain,
    families: Sequence[Family],
    base: Position | None,
) -> tuple[Found | None, int]:
    """Return the longest known part of a conversation, and how many digests were looked up.

    The search goes back from the end, so that it is short when the conversation only grew.
    """
    root = digests.root(asked)

    def has_root(at: Position) -> bool:
        known = index.sessions.get(at.session)
        return known is not None and known.root == root

    def rank(at: Position) -> tuple[bool, bool, int, bool, bool]:
        session = peek(service, index.principal, at.session)
        named = [number for number, (_, family) in enumerate(families) if at.session in family]
        return (
            session is not None,
            has_root(at),
            -min(named, default=len(families)),
            session is not None and session.idle,
            session is not None and session.head_id == at.turn,
        )

    compared = 0
    for answers in range(len(links.answers), 0, -1):
        compared += 1
        if positions := index.find(links.answers[answers - 1]):
            best = max(positions, key=rank)
            return Found(best, answers, has_root(best)), compared
    if base is not None:
        return Found(base, 0, has_root(base)), compared
    return None, compared


def named(families: Sequence[Family], found: Found | None) -> str:
    """Return the surest signal that stands for the session that was found."""
    if found is None:
        return "new"
    session = found.position.session
    return next((name for name, family in families if session in family), "prefix")


def peek(service: SessionService, principal: str, session: str) -> Session | None:
    """Return a session, None when it is gone."""
    try:
        return service.look(principal, session)
    except (SessionNotFound, SessionClosed):
        return None
