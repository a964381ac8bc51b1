"""What a dialect's request asks for, in one form: the whole conversation and how to go on."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from agentserve import wire
from agentserve.errors import InvalidRequest

SUPERSEDED = "the conversation went on without it"


class Said(msgspec.Struct, frozen=True):
    """Something that the user or the operator said."""

    role: Literal["user", "system"]
    text: str


class Result(msgspec.Struct, frozen=True):
    """What a tool gave back; `call_id` is the client's name for the call."""

    call_id: str
    text: str
    status: Literal["ok", "error"] = "ok"


class AskedCall(msgspec.Struct, frozen=True):
    """A call in a re-sent answer; `arguments` is its JSON as the client has it."""

    call_id: str
    name: str
    arguments: str


class Answered(msgspec.Struct, frozen=True):
    """An assistant message as the client re-sends it."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[AskedCall, ...] = ()


Unit = Said | Result | Answered


class Segment(msgspec.Struct, frozen=True):
    """What was fed before an answer, and the answer; the last segment has none yet.

    `results` are by the place of their call in the answer before.
    """

    results: tuple[tuple[int, Result], ...]
    said: tuple[Said, ...]
    answer: Answered | None = None


class Signal(msgspec.Struct, frozen=True):
    """A hint of the client's at a session: where it came from, and what it says."""

    name: str
    value: str


class Asked(msgspec.Struct):
    """One request of any dialect."""

    dialect: str
    model: str
    system: str | None
    segments: list[Segment]
    tools: list[wire.Tool]
    turn: wire.TurnRequest  # everything but its input
    stream: bool = False
    options: dict[str, bool | int | float | str | None] = {}
    keep_reasoning: bool = False  # the past is not rewritten at a user message
    signals: list[Signal] = []
    warnings: list[str] = []

    @property
    def logprobs(self) -> bool:
        """Whether the answer tells log probabilities."""
        return isinstance(self.turn.sampling.logprobs, int)

    @property
    def answers(self) -> int:
        """How many answers the history has."""
        return sum(segment.answer is not None for segment in self.segments)


def segments(units: Iterable[Unit], calls: Sequence[AskedCall] = ()) -> list[Segment]:
    """Return a conversation by answers; the last segment is what is fed now.

    calls: of an answer that the conversation goes on from. Raises InvalidRequest when a result
    answers no call of the answer before it.
    """
    done: list[Segment] = []
    said: list[Said] = []
    results: dict[int, Result] = {}
    places = _places(calls)
    for unit in units:
        if isinstance(unit, Said):
            said.append(unit)
        elif isinstance(unit, Result):
            results[_place(places, unit.call_id)] = unit
        else:
            done.append(Segment(tuple(sorted(results.items())), tuple(said), unit))
            said, results, places = [], {}, _places(unit.calls)
    return [*done, Segment(tuple(sorted(results.items())), tuple(said))]


def _places(calls: Sequence[AskedCall]) -> dict[str, deque[int]]:
    """Return by call id where the calls stand that have no result yet, the first one first."""
    places: dict[str, deque[int]] = {}
    for index, call in enumerate(calls):
        places.setdefault(call.call_id, deque()).append(index)
    return places


def _place(places: dict[str, deque[int]], call_id: str) -> int:
    if left := places.get(call_id):
        return left.popleft()
    raise InvalidRequest(
        f"the result of {call_id[:64]!r} answers no call of the assistant message before it",
        param="messages",
    )


def fed_items(
    segment: Segment, calls: Sequence[str], hidden: Sequence[str] = ()
) -> list[wire.Item]:
    """Return what a segment feeds after an answer whose calls have the ids `calls`.

    A call without a result is cancelled, and so are those that the client was not shown.
    """
    given = dict(segment.results)
    items: list[wire.Item] = []
    for index, call_id in enumerate(calls):
        result = given.get(index)
        if result is None:
            items.append(_cancelled(call_id))
        else:
            items.append(wire.ToolResultItem(call_id, result.text, result.status))
    items += [_cancelled(call_id) for call_id in hidden]
    for said in segment.said:
        items.append(
            wire.UserItem(said.text) if said.role == "user" else wire.SystemItem(said.text)
        )
    return items


def _cancelled(call_id: str) -> wire.ToolResultItem:
    return wire.ToolResultItem(call_id, status="cancelled", reason=SUPERSEDED)


def foreign_items(
    parts: Sequence[Segment], calls: Sequence[str], hidden: Sequence[str], first: int
) -> Iterator[wire.Item]:
    """Yield answered segments as items of a history; their calls get ids by place.

    `first` is the place of parts[0] in the conversation, after an answer with `calls`.
    """
    for number, segment in enumerate(parts, start=first):
        yield from fed_items(segment, calls, hidden)
        if segment.answer is not None:
            calls, hidden = foreign_ids(segment.answer, number), ()
            yield _assistant(segment.answer, calls)


def foreign_ids(answer: Answered, number: int) -> list[str]:
    """Return the ids of the calls in answer `number`, which this server did not generate."""
    return [f"call_{number}_{index}" for index in range(len(answer.calls))]


def _assistant(answer: Answered, ids: Sequence[str]) -> wire.AssistantItem:
    parts: list[wire.AssistantPart] = []
    if answer.reasoning:
        parts.append(wire.Reasoning(answer.reasoning))
    if answer.text:
        parts.append(wire.Text(answer.text))
    for call_id, call in zip(ids, answer.calls, strict=True):
        parts.append(wire.ToolCall(call.name, arguments_of(call.arguments), call_id))
    return wire.AssistantItem(parts)


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments; what is no JSON object is kept as one."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"raw_arguments": value}
