"""What a session of the client does, as flows: state, turns, edits."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from agentserve import wire
from agentserve.client.core import Api, Flow, error_of
from agentserve.client.models import HintOptions, Item, SessionOptions, Turn, TurnOptions
from agentserve.client.stream import StreamCore
from agentserve.client.tools import Tools
from agentserve.errors import AgentserveError, BadToolSchema, SessionClosed, SessionNotFound

T = TypeVar("T")
Input: TypeAlias = str | Item | Iterable[Item] | None

_JOINED = "completed", "incomplete"


@dataclass(frozen=True)
class Opening:
    """Which session is wanted."""

    id: str | None
    resume: bool
    tools: Tools
    options: SessionOptions


def open_session(api: Api, wanted: Opening) -> Flow["SessionCore"]:
    """Create a session; with `resume`, take up the one of that id when it exists."""
    if wanted.resume:
        if wanted.id is None:
            raise ValueError("to resume a session its id is needed")
        try:
            info = yield from api.call("GET", _path(wanted.id), wire.SessionInfo)
            core = SessionCore(api, info, wanted.tools)
            core.taken_up = frozenset(call.call_id for call in info.pending_calls)
            return core
        except SessionNotFound:
            pass
    body: dict[str, Any] = {**wanted.options}
    if wanted.id is not None:
        body["id"] = wanted.id
    create = partial(api.call, "POST", "/sessions", wire.SessionInfo)
    info = yield from _with_tools(create, body, wanted.tools)
    return SessionCore(api, info, wanted.tools)


def _with_tools(send: Callable[[Any], Flow[T]], body: dict[str, Any], tools: Tools) -> Flow[T]:
    """Send `body` with the tools, without those of MCP servers that the server refuses."""
    while True:
        try:
            return (yield from send({**body, "tools": tools.described}))
        except BadToolSchema as refused:
            if not tools.leave_out(refused):
                raise


def list_sessions(api: Api, query: Mapping[str, Any]) -> Flow[wire.SessionList]:
    """Return one page of sessions."""
    return (yield from api.call("GET", _with_query("/sessions", query), wire.SessionList))


class SessionCore:
    """One session: its head as this client knows it, and a flow for each thing to do with it."""

    def __init__(self, api: Api, info: wire.SessionInfo, tools: Tools) -> None:
        self._api = api
        self.id = info.id
        self.path = _path(info.id)
        self.tools = tools
        self.head = info.head
        self._head_known = True
        self._prefills = False  # the turn that runs generates nothing
        self._malformed: dict[str, str] = {}  # call_id -> error, of the last turn
        self.taken_up: frozenset[str] = frozenset()  # calls that another program may have run

    # Turns

    def step(self, given: Input, options: TurnOptions) -> Flow[Turn]:
        """Feed items, generate, return the turn. An interrupted step is cancelled."""
        body = yield from self._turn_body(given, options, stream=False)
        try:
            turn = yield from self._api.call("POST", f"{self.path}/turn", wire.Turn, body)
        except GeneratorExit:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                yield from self.abandon(None, options)
            raise
        return self._adopt(turn)

    def open_stream(self, given: Input, options: TurnOptions) -> Flow[StreamCore]:
        """Start a turn and return its stream; one that is interrupted meanwhile is cancelled."""
        body = yield from self._turn_body(given, options, stream=True)
        request = self._api.request("POST", f"{self.path}/turn", body, stream=True)
        stream = StreamCore(self._api, request, self._adopt)
        try:
            yield from stream.open()
        except GeneratorExit:
            raise
        except BaseException:
            yield from self.end_stream(stream, options)
            raise
        return stream

    def end_stream(self, stream: StreamCore, options: TurnOptions) -> Flow[None]:
        """Close a stream and cancel its turn if it has not ended."""
        yield from stream.release()
        if not stream.ended:
            stream.ended = True
            yield from self.abandon(stream.turn_id, options)

    def abandon(self, turn_id: str | None, options: TurnOptions) -> Flow[None]:
        """Cancel a turn that nobody reads any more, unless it was asked to continue.

        A turn without a known id that may be queued behind another one is left to the server,
        which cancels it because its connection is gone.
        """
        self._head_known = False
        if options.get("on_disconnect") == "continue":
            return
        if turn_id is None and options.get("when_busy") == "queue":
            return
        try:
            yield from self._api.call(
                "POST", f"{self.path}/cancel", wire.Turn, {"turn": turn_id, "keep": "none"}
            )
        except (AgentserveError, ConnectionError):
            return  # it had ended already, or the server cancels it because the connection is gone

    def pending_turn(self) -> Flow[Turn | None]:
        """Return the turn whose calls wait for results, with those calls only; None without any.

        Its unreadable calls are answered with the next results.
        """
        info = yield from self.info()
        waiting = {call.call_id for call in info.pending_calls}
        if not waiting or info.head is None:
            return None
        turn = yield from self._api.call("GET", f"{self.path}/turns/{info.head}", wire.Turn)
        calls = [item for item in turn.output if getattr(item, "call_id", None) in waiting]
        self._malformed = _errors(calls)
        return Turn(msgspec.structs.replace(turn, output=calls))

    def _turn_body(self, given: Input, options: TurnOptions, stream: bool) -> Flow[dict[str, Any]]:
        if not self._head_known:
            yield from self.info()
        items = self._answer_malformed(_items(given))
        self._prefills = options.get("max_output_tokens") == 0
        return {**options, "input": items, "expect_head": self.head, "stream": stream}

    def _answer_malformed(self, given: str | list[Item]) -> str | list[Item]:
        """Add the errors of unreadable calls to the results of the calls beside them.

        A user message while calls are pending stays the error that it is.
        """
        if isinstance(given, str) or not all(_is_result(item) for item in given):
            return given
        answered = {_call_id(item) for item in given}
        extra = [
            wire.ToolResultItem(call_id, error, "error")
            for call_id, error in self._malformed.items()
            if call_id not in answered
        ]
        return [*given, *extra]

    def _adopt(self, turn: wire.Turn) -> Turn:
        if turn.status == "failed" and turn.error is not None:
            raise error_of(turn.error)
        if turn.status in _JOINED and not self._prefills:
            self._move_to(turn.id)
            self._malformed = _errors(turn.output)
        else:
            # What a cancelled turn left depends on what was kept; one that only prefills what was
            # fed before leaves nothing.
            self._head_known = False
        return Turn(turn)

    def _move_to(self, head: str | None) -> None:
        self.head = head
        self._head_known = True
        self._malformed = {}

    # Everything else

    def _post(self, action: str, answer: type[T], body: Any) -> Flow[T]:
        return (yield from self._api.call("POST", f"{self.path}/{action}", answer, body))

    def info(self) -> Flow[wire.SessionInfo]:
        """Return the session as the server sees it, and take over its head."""
        info = yield from self._api.call("GET", self.path, wire.SessionInfo)
        self.head, self._head_known = info.head, True
        return info

    def turns(self) -> Flow[list[Turn]]:
        """Return the turns from the first to the head."""
        found = yield from self._api.call("GET", f"{self.path}/turns", wire.TurnList)
        return [Turn(turn) for turn in found.turns]

    def update(self, changes: Mapping[str, Any]) -> Flow[wire.HeadAnswer]:
        """Change metadata, ttl_ms or tools."""
        body = dict(changes)
        tools: Tools | None = body.get("tools")
        patch = partial(self._api.call, "PATCH", self.path, wire.HeadAnswer)
        change = patch(body) if tools is None else _with_tools(patch, body, tools)
        answer = yield from change
        self.tools = tools or self.tools
        self._move_to(answer.head)
        return answer

    def tool_results(self, results: Iterable[Item]) -> Flow[wire.ToolResultsAnswer]:
        """Stage results."""
        return (
            yield from self._post(
                "tool_results", wire.ToolResultsAnswer, {"results": list(results)}
            )
        )

    def hint(self, hints: HintOptions) -> Flow[None]:
        """Say what is known about the wait."""
        yield from self._post("hints", object, hints)

    def fork(
        self, n: int | None, at: Turn | str | None, options: Mapping[str, Any]
    ) -> Flow[list["SessionCore"]]:
        """Return copies of the session."""
        body = {**options, "n": n or 1}
        if at is not None:
            body["at"] = at.id if isinstance(at, Turn) else at
        answer = yield from self._post("fork", wire.ForkAnswer, body)
        return [SessionCore(self._api, info, self.tools) for info in answer.sessions]

    def rollback(self, to: Turn | str | None, before: Turn | str | None) -> Flow[wire.HeadAnswer]:
        """Move the head back."""
        places = {"to": to, "before": before}
        body: dict[str, Any] = {
            name: place.id if isinstance(place, Turn) else place
            for name, place in places.items()
            if place is not None
        }
        if self._head_known:
            body["expect_head"] = self.head
        answer = yield from self._post("rollback", wire.HeadAnswer, body)
        self._move_to(answer.head)
        return answer

    def rewrite(self, items: Iterable[Item | Turn], prefill: bool) -> Flow[wire.HeadAnswer]:
        """Replace the history; turns of this session among the items stay as they are."""
        if not self._head_known:
            yield from self.info()
        body = {
            "items": [{"ref": item.id} if isinstance(item, Turn) else item for item in items],
            "expect_head": self.head,
            "prefill": prefill,
        }
        answer = yield from self._api.call("PUT", f"{self.path}/history", wire.HeadAnswer, body)
        self._move_to(answer.head)
        return answer

    def count(self, given: Input) -> Flow[wire.CountAnswer]:
        """Return what feeding these items would take."""
        return (yield from self._post("count", wire.CountAnswer, {"input": _items(given)}))

    def cancel(self, body: Mapping[str, Any]) -> Flow[Turn]:
        """Stop the running turn."""
        turn = yield from self._post("cancel", wire.Turn, body)
        self._head_known = False
        return Turn(turn)

    def transcript(self, form: str) -> Flow[Any]:
        """Export the session."""
        path = _with_query(f"{self.path}/transcript", {"format": form})
        return (yield from self._api.call("GET", path, object))

    def delete(self, keep_transcript: bool) -> Flow[None]:
        """Close the session; that it is gone already is what was wanted."""
        query = {"keep": "transcript"} if keep_transcript else {}
        try:
            yield from self._api.call("DELETE", _with_query(self.path, query), object)
        except (SessionNotFound, SessionClosed):
            return


def _errors(output: Iterable[wire.OutputItem]) -> dict[str, str]:
    return {
        item.call_id: item.error for item in output if isinstance(item, wire.MalformedToolCallOut)
    }


def _path(session_id: str) -> str:
    return f"/sessions/{quote(session_id, safe='')}"


def _with_query(path: str, query: Mapping[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _items(given: Input) -> str | list[Item]:
    if given is None:
        return []
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping | wire.Request):
        return [given]
    return list(given)


def _is_result(item: Item) -> bool:
    if isinstance(item, Mapping):
        return item.get("type") == "tool_result"
    return isinstance(item, wire.ToolResultItem)


def _call_id(item: Item) -> Any:
    return item.get("call_id") if isinstance(item, Mapping) else getattr(item, "call_id", None)
