"""Operations on the head of a session that run no model: each is worked out first, then taken."""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from agentserve.clock import Clock
from agentserve.engine.messages import EngineLink
from agentserve.errors import AgentserveError, BadToolSchema, ContextFull, InvalidRequest, StoreFull
from agentserve.sessions.driver import TurnDriver
from agentserve.sessions.edits import (
    Edit,
    edit_history,
    edit_rollback,
    edit_tools,
    import_history,
)
from agentserve.sessions.prepare import require_known
from agentserve.sessions.prompt import compose, require_plausible, resolve_input
from agentserve.sessions.registry import Registry, require_one_id
from agentserve.sessions.schemas import validate_schema
from agentserve.sessions.session import Profile, Session
from agentserve.sessions.store import Store
from agentserve.wire import (
    Context,
    CountAnswer,
    CountRequest,
    CreateRequest,
    ForkRequest,
    HeadAnswer,
    HistoryItem,
    HistoryRequest,
    PatchRequest,
    RollbackRequest,
    Tool,
)

MAX_TOOLS_BYTES = 512 * 1024  # of one session


class HeadMoves:
    """History, rollback, fork, changed tools and count."""

    def __init__(
        self,
        driver: TurnDriver,
        registry: Registry,
        store: Store,
        link: EngineLink,
        clock: Clock,
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._store = store
        self._link = link
        self._clock = clock

    def import_into(self, session: Session, items: Sequence[HistoryItem]) -> HeadAnswer:
        """Make `items` the session's history. Raises what refuses them; nothing changes then.

        The head is named after the last turn when that is a new one.
        """
        fresh_from = session.next_turn
        now_ms = int(self._clock.time() * 1000)
        preparer = self._driver.preparer
        entries, pending, staged = import_history(session, preparer, items, now_ms)
        messages = [message for entry in entries for message in entry.messages]
        require_plausible(session, messages, preparer.text, self._driver.info)
        last = entries[-1].turn if entries else ""
        fresh = bool(last) and int(last[2:]) >= fresh_from
        head_id = last if fresh else session.mint_turn()
        edit = edit_history(session, preparer.text, entries, pending, head_id=head_id)
        self._require_fits(len(edit.log))
        self._take(session, edit)
        session.staged.update(staged)
        return edit.answer

    def _require_fits(self, tokens: int) -> None:
        limit = self._driver.info.max_context
        if tokens > limit:
            raise ContextFull(
                f"a history of {tokens} tokens does not fit the context of {limit}",
                param="items",
                used=0,
                input=tokens,
                limit=limit,
                over=tokens - limit,
            )

    def _take(self, session: Session, edit: Edit) -> None:
        self._driver.discard_ahead(session)
        node = edit.node
        if node is not None and session.tree.nodes.get(node.id) is not node:
            session.tree.add(node, edit.log)
        else:
            session.tree.move(node)
        session.drop_staged()
        session.last_active = self._clock.time()

    async def history(self, session: Session, request: HistoryRequest) -> HeadAnswer:
        """Replace the history; `ref` items keep those turns as they are."""
        session.require_idle()
        session.require_head(request.expect_head)
        return self.import_into(session, request.items)

    async def rollback(self, session: Session, request: RollbackRequest) -> HeadAnswer:
        """Move the head back; the branch that is left stays reachable until it is pruned."""
        session.require_idle()
        session.require_head(request.expect_head)
        edit = edit_rollback(session, self._driver.preparer.text, request)
        self._take(session, edit)
        return edit.answer

    async def patch(self, session: Session, request: PatchRequest) -> HeadAnswer:
        """Change metadata, ttl or tools; the answer says what the next turn will compute."""
        head = session.head
        answer = HeadAnswer(session.head_id, head.length if head is not None else 0, 0, [])
        if request.tools is not UNSET and tuple(request.tools) != session.profile.tools:
            session.require_idle()
            await asyncio.to_thread(check_tools, request.tools)
            self._registry.open(session.principal, session.id)
            session.require_idle()
            answer = self._change_tools(session, tuple(request.tools)) or answer
        if request.metadata is not UNSET:
            session.profile.metadata = request.metadata
        if request.ttl_ms is not UNSET:
            session.profile.ttl_ms = request.ttl_ms
        session.last_active = self._clock.time()
        return answer

    async def reprofile(self, session: Session, request: CreateRequest) -> None:
        """Give an idle session another system text, other tools and other template options.

        The history stays, rendered anew with its own ids. Raises SessionBusy, ContextFull.
        """
        if tuple(request.tools) != session.profile.tools:
            await asyncio.to_thread(check_tools, request.tools)
            self._registry.open(session.principal, session.id)
        session.require_idle()
        profile = msgspec.structs.replace(
            session.profile,
            system=request.system,
            tools=tuple(request.tools),
            template_options=request.template_options,
        )
        self._change_prompt(session, profile)

    def _change_tools(self, session: Session, tools: tuple[Tool, ...]) -> HeadAnswer | None:
        return self._change_prompt(session, msgspec.structs.replace(session.profile, tools=tools))

    def _change_prompt(self, session: Session, profile: Profile) -> HeadAnswer | None:
        before = session.profile
        profile.tools_version += 1
        session.profile = profile
        if session.head is None:
            return None
        try:
            edit = edit_tools(session, self._driver.preparer.text)
            self._require_fits(len(edit.log))
        except AgentserveError:
            session.profile = before
            raise
        assert edit.node is not None
        self._driver.discard_ahead(session)
        session.tree.add(edit.node, edit.log)
        return edit.answer

    async def fork(self, source: Session, request: ForkRequest) -> list[Session]:
        """Return new sessions at the head, or at an older turn, that share the KV."""
        require_one_id(request.id, request.n)
        names = {tool.name for tool in source.profile.tools}
        require_known(names, request.tools_allowed or [], "tools_allowed")
        self._registry.require_quota(source.principal, request.n)
        forks = [self._fork_one(source, request) for _ in range(request.n)]
        await self._store_all(forks, msgspec.json.encode(request))
        source.mirror.sync(self._driver.incarnation)
        for fork in forks:
            self._registry.add(fork)
            command = source.mirror.fork_into(fork.mirror, fork.tree.log(fork.head))
            if command is not None:
                self._link.send(command)
        return forks

    async def _store_all(self, forks: list[Session], record: bytes) -> None:
        try:
            for fork in forks:
                await self._store.accept(fork.key, "session", record)
        except StoreFull:
            for fork in forks:
                await self._store.delete(fork.key)
            raise

    def _fork_one(self, source: Session, request: ForkRequest) -> Session:
        profile = msgspec.structs.replace(source.profile)
        if request.tools_allowed is not None:
            profile.tools_allowed = tuple(request.tools_allowed)
        fork = self._registry.new(source.principal, request.id, profile)
        fork.template_now = source.template_now
        fork.tree = source.tree.copy()
        fork.next_turn, fork.next_item = source.next_turn, source.next_item
        fork.staged = dict(source.staged)
        if request.at is not None and request.at != fork.head_id:
            text = self._driver.preparer.text
            edit = edit_rollback(fork, text, RollbackRequest(to=request.at))
            self._take(fork, edit)
        fork.drop_staged()
        return fork

    async def count(self, session: Session, request: CountRequest) -> CountAnswer:
        """Return the tokens of a turn with this input; runs nothing."""
        fed = resolve_input(session, request.input, "require")
        text = self._driver.preparer.text
        require_plausible(session, fed.messages, text, self._driver.info)
        prompt = compose(session, text, fed, generates=True)
        total, limit = len(prompt.log), self._driver.info.max_context
        return CountAnswer(total, prompt.new_tokens, Context(total, limit, max(0, limit - total)))


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise BadToolSchema or InvalidRequest for tools that cannot be served.

    Takes seconds for many large schemas.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", param="tools")
    if (size := len(msgspec.json.encode(tools))) > MAX_TOOLS_BYTES:
        raise BadToolSchema(
            f"the tools take {size} bytes, more than {MAX_TOOLS_BYTES}", param="tools"
        )
    for tool in tools:
        validate_schema(tool)
