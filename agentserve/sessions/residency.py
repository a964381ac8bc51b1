"""Where the KV of sessions is: the engine is asked, and its last answer is kept."""

import asyncio
import itertools
from collections.abc import Iterable

from agentserve import wire
from agentserve.engine.messages import EngineLink, Inspect, Inspected, Residency
from agentserve.sessions.mirror import Mirror
from agentserve.wire import KvTokens

ANSWER_S = 1.0  # an engine that takes longer is busy; what it said before is shown


class ResidencyBoard:
    """Asks where KV is. The answers are kept by the mirrors."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[list[Residency]]] = {}

    async def refresh(self, mirrors: Iterable[Mirror]) -> None:
        """Bring what the mirrors know up to date, in one question and at most ANSWER_S seconds."""
        known = [mirror for mirror in mirrors if mirror.tokens]
        if not known:
            return
        number = next(self._numbers)
        answer: asyncio.Future[list[Residency]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._link.send(Inspect(number, [mirror.sequence for mirror in known]))
        try:
            async with asyncio.timeout(ANSWER_S):
                found = {one.sequence: one for one in await answer}
        except TimeoutError:
            return
        finally:
            del self._asked[number]
        for mirror in known:
            if mirror.tokens:  # it was not lost meanwhile
                nowhere = Residency(mirror.sequence, 0, 0, 0, 0, 0, 0.0)
                mirror.residency = found.get(mirror.sequence, nowhere)

    def on_inspected(self, event: Inspected) -> None:
        """Take an answer; a late one is of no use."""
        answer = self._asked.get(event.number)
        if answer is not None and not answer.done():
            answer.set_result(event.sequences)


def shown(mirror: Mirror) -> tuple[KvTokens, wire.Residency]:
    """Return where a session's KV is, and what was moved for it, as clients see that."""
    known = mirror.residency
    if known is None:  # never asked since the engine has it
        return KvTokens(device=mirror.kv_length), wire.Residency()
    stall_ms = round(known.stall_s * 1000)
    moved = wire.Residency(known.saved_bytes, known.loaded_bytes, stall_ms)
    return KvTokens(device=known.device, host=known.host), moved


def tiers(mirror: Mirror) -> set[str]:
    """Return the tiers that hold KV of a session; "none" when no tier does."""
    kv, _ = shown(mirror)
    found = {name for name in ("device", "host", "disk") if getattr(kv, name)}
    return found or {"none"}
