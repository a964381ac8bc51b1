"""A session that the native API has made, as the conversation that a client would re-send."""

from collections.abc import Iterator

from agentserve import wire
from agentserve.dialects.asked import Answered, AskedCall, Result, Said, Segment
from agentserve.dialects.digests import after_answer, after_input
from agentserve.dialects.index import Position
from agentserve.sessions.items import plain_text, result_text
from agentserve.sessions.session import Session
from agentserve.sessions.tree import Entry


def learned(session: Session) -> Iterator[tuple[bytes, Position]]:
    """Yield the digest and the place of every answer in the head's history."""
    state, calls = b"", dict[str, int]()
    for entry in session.tree.entries(session.head):
        answer = _answer(entry)
        segment = Segment(tuple(_results(entry, calls)), tuple(_said(entry)), answer)
        state = after_answer(after_input(state, segment), answer)
        calls = {call.call_id: index for index, call in enumerate(answer.calls)}
        hidden = tuple(call.call_id for call in entry.calls if call.call_id not in calls)
        yield state, Position(session.id, entry.turn, tuple(calls), hidden)


def _answer(entry: Entry) -> Answered:
    text, calls = "", []
    for item in entry.output:
        if isinstance(item, wire.TextOut):
            text += item.text
        elif isinstance(item, wire.MalformedToolCallOut):
            text += item.raw
        elif isinstance(item, wire.ToolCallOut):
            arguments = wire.encode(item.arguments).decode()
            calls.append(AskedCall(item.call_id, item.name, arguments))
    return Answered(text, calls=tuple(calls))


def _results(entry: Entry, calls: dict[str, int]) -> Iterator[tuple[int, Result]]:
    for item in entry.fed:
        if isinstance(item, wire.ToolResultItem) and item.call_id in calls:
            yield calls[item.call_id], Result(item.call_id, result_text(item))


def _said(entry: Entry) -> Iterator[Said]:
    for item in entry.fed:
        if isinstance(item, wire.UserItem):
            yield Said("user", plain_text(item.content))
        elif isinstance(item, wire.SystemItem):
            yield Said("system", plain_text(item.content))
