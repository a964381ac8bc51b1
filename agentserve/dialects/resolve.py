"""From a whole conversation to a turn in a session: found, branched, edited or begun."""

import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec import UNSET

from agentserve import wire
from agentserve.clock import Clock
from agentserve.config import ServerSettings
from agentserve.dialects import digests
from agentserve.dialects.asked import Asked, Segment, fed_items, foreign_ids, foreign_items
from agentserve.dialects.finding import SIGNALS, Found, find, named, peek, signal_families
from agentserve.dialects.index import Index, Known, Position
from agentserve.dialects.learn import learned
from agentserve.dialects.shown import Part, answered
from agentserve.dialects.signals import EXPLICIT
from agentserve.errors import (
    HeadMoved,
    Overloaded,
    QuotaExceeded,
    SessionBusy,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    TurnNotFound,
)
from agentserve.sessions.handle import TurnHandle
from agentserve.sessions.service import SessionService
from agentserve.sessions.session import Session

T = TypeVar("T")

TRIES = 8
_SESSION_ID = re.compile(wire.SESSION_ID)


@dataclass
class Resolved:
    """A dialect request's turn in its session.

    `digest` is of all that led to it, and once it has ended of the answer too; `place` is its own.
    """

    principal: str
    session: str
    handle: TurnHandle
    digest: bytes
    signal: str
    compared: int = 0  # digests looked up
    imported: int = 0  # answers of the history that the session did not have
    place: Position | None = None


@dataclass
class Resolver:
    """Finds the sessions of all dialect requests, and bounds those that they create."""

    service: SessionService
    settings: ServerSettings
    clock: Clock
    resolved: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SIGNALS, 0)))
    evicted: int = 0
    lookups: int = 0  # digests that were looked up
    imported: int = 0  # answers of histories that no session had
    _indexes: dict[str, Index] = field(default_factory=dict)

    @property
    def sessions(self) -> int:
        """How many sessions dialect requests have."""
        return sum(len(index.sessions) for index in self._indexes.values())

    async def begin(
        self, principal: str, asked: Asked, base: Position | None = None, state: bytes = b""
    ) -> Resolved:
        """Start the turn that `asked` is for.

        With `base`, the position that `previous_response_id` names, and its digest, `asked` has
        only what follows. Raises what refuses the turn.
        """
        self.service.driver.require_engine()
        index = self._index(principal)
        self._sweep(index)
        links = digests.chain(asked.segments, state)
        for signal in asked.signals:
            if signal.name == EXPLICIT:
                self._learn(index, signal.value)
        for _ in range(TRIES):
            families = signal_families(self.service, index, asked, base)
            found, compared = find(self.service, index, asked, links, families, base)
            try:
                resolved = await self._start(index, asked, links, found)
            except (SessionNotFound, SessionClosed, TurnNotFound) as error:
                if found is None or found.position is base:
                    raise
                gone = found.position.turn if isinstance(error, TurnNotFound) else None
                index.forget(found.position.session, gone)
            except (SessionBusy, HeadMoved, SessionExists):
                continue  # another request came between
            else:
                resolved.compared = compared
                self._note(index, asked, resolved, named(families, found))
                return resolved
        raise Overloaded("too many requests at once for one conversation; try again")

    def finish(self, resolved: Resolved, turn: wire.Turn, parts: list[Part]) -> None:
        """Remember a turn that ended well, before its client is told; once is enough."""
        if resolved.place is not None:
            return
        answer = answered(parts)
        shown = tuple(call.call_id for call in answer.calls)
        hidden = tuple(
            item.call_id
            for item in turn.output
            if isinstance(item, wire.ToolCallOut | wire.MalformedToolCallOut)
            and item.call_id not in shown
        )
        resolved.place = Position(resolved.session, turn.id, shown, hidden)
        resolved.digest = digests.after_answer(resolved.digest, answer)
        self._index(resolved.principal).place(resolved.digest, resolved.place)

    async def count(self, principal: str, asked: Asked) -> int:
        """Return the tokens of the prompt that `asked` would be; nothing is run or kept."""
        create, content = self._as_new(asked, None)
        turn = wire.CountRequest(content)
        answer = await self._with_room(
            self._index(principal), lambda: self.service.measure(principal, create, turn)
        )
        return answer.input_tokens

    # Starting

    def _learn(self, index: Index, session_id: str) -> None:
        """Take in a session of the native API that the client names."""
        session = peek(self.service, index.principal, session_id)
        if session is None or session_id in index.sessions:
            return
        profile = session.profile
        root = digests.profile_digest(profile.system, profile.tools, profile.template_options)
        index.add(self._known(session, root, owned=False))
        for digest, position in learned(session):
            index.place(digest, position)

    async def _start(
        self, index: Index, asked: Asked, links: digests.Chain, found: Found | None
    ) -> Resolved:
        position: Position | None = None
        imported = len(links.answers)
        if found is None:
            session, content = await self._create(index, asked, links)
        else:
            position = await self._arrive(index, asked, found)
            session = position.session
        own = found is None or session != found.position.session
        head = self.service.look(index.principal, session).head_id
        try:
            if found is not None and position is not None:
                rest = asked.segments[found.answers :]
                imported = len(rest) - 1
                if imported:
                    position = await self._import(index.principal, position, rest, found.answers)
                    head = position.turn
                    index.place(links.answers[-1], position)
                content = fed_items(rest[-1], position.calls, position.hidden)
            request = msgspec.structs.replace(
                asked.turn,
                input=content,
                expect_head=UNSET if position is None else position.turn,
            )
            handle = await self.service.start_turn(index.principal, session, request)
        except BaseException:
            if own:
                await self._undo(index, session, head)
            raise
        index.used(session, self.clock.monotonic())
        return Resolved(index.principal, session, handle, links.end, "", imported=imported)

    async def _create(
        self, index: Index, asked: Asked, links: digests.Chain
    ) -> tuple[str, list[wire.Item]]:
        wanted = next((s.value for s in asked.signals if s.name == EXPLICIT), "")
        name = wanted if _SESSION_ID.fullmatch(wanted) else None
        create, content = self._as_new(asked, name)
        try:
            info = await self._made(index, create)
        except SessionExists:
            info = await self._made(index, msgspec.structs.replace(create, id=None))
        session = self.service.look(index.principal, info.id)
        await self._take_in(index, session, digests.root(asked))
        if links.answers and session.head_id is not None:
            calls = _last_calls(asked.segments, 0)
            index.place(links.answers[-1], Position(info.id, session.head_id, calls))
        return info.id, content

    def _as_new(
        self, asked: Asked, session_id: str | None
    ) -> tuple[wire.CreateRequest, list[wire.Item]]:
        *history, last = asked.segments
        create = wire.CreateRequest(
            id=session_id,
            system=asked.system,
            tools=asked.tools,
            history=list(foreign_items(history, (), (), 0)),
            template_options=asked.options,
            on_template_rewrite="keep" if asked.keep_reasoning else "recompute",
            ttl_ms=int(self.settings.dialect_ttl_s * 1000),
            metadata={"dialect": asked.dialect},
        )
        return create, fed_items(last, _last_calls(asked.segments, 0))

    async def _arrive(self, index: Index, asked: Asked, found: Found) -> Position:
        """Bring a session to the found place: that one, or a branch of one that is in use.

        One that awaits its tools is in use: it will most likely go on from where it is.
        """
        at, principal = found.position, index.principal
        session = self.service.look(principal, at.session)
        if found.same_root and session.idle and session.head_id == at.turn:
            return at
        if found.same_root and session.idle and not session.pending():
            await self.service.rollback(principal, at.session, wire.RollbackRequest(to=at.turn))
            # A turn inside an imported stretch gets a new node, with the same history.
            return msgspec.structs.replace(at, turn=session.head_id or at.turn)
        fork = wire.ForkRequest(at=at.turn)
        made = await self._with_room(index, lambda: self.service.fork(principal, at.session, fork))
        branch = self.service.look(principal, made.sessions[0].id)
        await self._take_in(index, branch, digests.root(asked))
        if not found.same_root:
            alone = msgspec.structs.replace(asked, segments=asked.segments[-1:])
            create, _ = self._as_new(alone, None)
            try:
                await self.service.reprofile(principal, branch.id, create)
            except BaseException:
                await self._discard(index, branch.id)
                raise
        return Position(branch.id, branch.head_id or at.turn, at.calls, at.hidden)

    async def _import(
        self, principal: str, at: Position, rest: list[Segment], answers: int
    ) -> Position:
        """Replace what follows a place by answers that the session did not give."""
        session = self.service.look(principal, at.session)
        path = session.tree.entries(session.head)
        first, last = path[0].turn, path[-1].turn
        kept = wire.RefItem(first if first == last else f"{first}..{last}")
        items = [kept, *foreign_items(rest[:-1], at.calls, at.hidden, answers)]
        request = wire.HistoryRequest(items, expect_head=at.turn)
        answer = await self.service.history(principal, at.session, request)
        return Position(at.session, answer.head or at.turn, _last_calls(rest, answers))

    # Keeping

    def _note(self, index: Index, asked: Asked, resolved: Resolved, name: str) -> None:
        """Count the signal that stood for the session; from now on every one of them does."""
        resolved.signal = name
        self.lookups += resolved.compared
        self.imported += resolved.imported
        self.resolved[name] += 1
        for signal in asked.signals:
            index.join((signal.name, signal.value), resolved.session)

    def _index(self, principal: str) -> Index:
        if principal not in self._indexes:
            self._indexes[principal] = Index(principal)
        return self._indexes[principal]

    def _known(self, session: Session, root: bytes, *, owned: bool) -> Known:
        return Known(session.id, root, session.tag, owned, self.clock.monotonic())

    async def _take_in(self, index: Index, session: Session, root: bytes) -> None:
        index.add(self._known(session, root, owned=True))
        while len(index.sessions) > self.settings.dialect_sessions and await self._evict(index):
            pass

    async def _made(self, index: Index, create: wire.CreateRequest) -> wire.SessionInfo:
        info, created = await self._with_room(
            index, lambda: self.service.create(index.principal, create)
        )
        if not created:
            raise SessionExists("the name is in use", param="id")
        return info

    async def _with_room(self, index: Index, make: Callable[[], Awaitable[T]]) -> T:
        """Make a session; the one that was used longest ago goes where the quota is full."""
        try:
            return await make()
        except QuotaExceeded:
            if not await self._evict(index):
                raise
            return await make()

    async def _evict(self, index: Index) -> bool:
        """End the idle session that was used longest ago, but not the newest one."""
        for known in list(index.sessions.values())[:-1]:
            session = peek(self.service, index.principal, known.id)
            if session is None or not known.owned:
                index.forget(known.id)
                return True
            if session.idle:
                self.evicted += 1
                await self._discard(index, known.id)
                return True
        return False

    async def _discard(self, index: Index, session: str) -> None:
        index.forget(session)
        with contextlib.suppress(SessionNotFound, SessionClosed):
            await self.service.delete(index.principal, session, keep_transcript=False)

    async def _undo(self, index: Index, session: str, head: str | None) -> None:
        """End a session that was made for a turn that is refused, unless others use it by now."""
        now = peek(self.service, index.principal, session)
        if now is not None and now.idle and now.head_id == head:
            await self._discard(index, session)

    def _sweep(self, index: Index) -> None:
        """Forget the sessions whose time has run out; the service closes them."""
        oldest = self.clock.monotonic() - self.settings.dialect_ttl_s
        for known in list(index.sessions.values()):
            if known.last_used > oldest:
                break
            index.forget(known.id)


def _last_calls(parts: list[Segment], first: int) -> tuple[str, ...]:
    """Return the ids of the calls before the last segment; `first` is the place of parts[0]."""
    answer = parts[-2].answer if len(parts) > 1 else None
    return tuple(foreign_ids(answer, first + len(parts) - 2)) if answer is not None else ()
