"""What a turn shows to a client of any dialect: text, reasoning and calls as they come."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from agentserve import wire
from agentserve.dialects.asked import Answered, AskedCall
from agentserve.errors import CATALOGUE, AgentserveError, Draining, EngineError


class Part(msgspec.Struct):
    """A text, a reasoning, or a call (its `text` is the arguments' JSON).

    `logprobs` are those of the text's tokens, if the turn has asked for them.
    """

    index: int
    kind: str  # text | reasoning | call
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[wire.TokenLogprob] = []


class Opened(msgspec.Struct, frozen=True):
    """A part begins."""

    part: Part


class More(msgspec.Struct, frozen=True):
    """A part goes on with `delta`."""

    part: Part
    delta: str
    logprobs: list[wire.TokenLogprob] = []


class Closed(msgspec.Struct, frozen=True):
    """A part is whole."""

    part: Part


class Begun(msgspec.Struct, frozen=True):
    """The turn was admitted."""

    cached_tokens: int


class Ended(msgspec.Struct, frozen=True):
    """The turn ended well; nothing follows."""

    turn: wire.Turn
    parts: list[Part]


Step = Begun | Opened | More | Closed | Ended


async def steps(events: AsyncIterator[tuple[int, wire.Event]]) -> AsyncIterator[Step]:
    """Yield what the events of one turn show.

    A call that began and could not be read stays a call, with the arguments so far; other text that
    was meant as a call is text. Raises what the turn failed of.
    """
    writer = _Writer()
    async for _, event in events:
        if isinstance(event, wire.TurnStarted):
            yield Begun(event.cached_tokens)
        elif isinstance(event, wire.ErrorEvent):
            raise failure(event.error)
        elif isinstance(event, wire.TurnDone):
            require_answer(event.turn)
            for step in writer.end(event.turn):
                yield step
            yield Ended(event.turn, writer.parts)
        else:
            for step in writer.take(event):
                yield step


class _Writer:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None

    def take(self, event: wire.Event) -> list[Step]:
        if isinstance(event, wire.ItemStarted):
            return self._start(event.item)
        if isinstance(event, wire.TextDelta):
            return self._more(event.delta, event.logprobs)
        if isinstance(event, wire.ReasoningDelta | wire.ToolCallDelta):
            return self._more(event.delta)
        if isinstance(event, wire.ItemDone):
            return self._done(event.item)
        return []

    def end(self, turn: wire.Turn) -> list[Step]:
        """Close what a cut has left open; say all of a turn of which only the end was told."""
        if self.parts:
            return self._close() if self._open is not None else []
        return [step for item in turn.output for step in self._whole(item)]

    def _whole(self, item: wire.OutputItem) -> list[Step]:
        steps = self._start(item)
        if isinstance(item, wire.TextOut):
            steps += self._more(item.text, item.logprobs)
        elif isinstance(item, wire.ReasoningOut):
            steps += self._more(item.text)
        return steps + self._done(item)

    def _start(self, item: wire.OutputItem) -> list[Step]:
        if isinstance(item, wire.TextOut):
            return self._opened("text")
        if isinstance(item, wire.ReasoningOut):
            return self._opened("reasoning")
        if isinstance(item, wire.ToolCallOut):
            return self._opened("call", item.call_id, item.name)
        return []

    def _opened(self, kind: str, call_id: str = "", name: str = "") -> list[Step]:
        part = Part(len(self.parts), kind, "", call_id, name)
        self.parts.append(part)
        self._open = part
        return [Opened(part)]

    def _more(self, delta: str, logprobs: Sequence[wire.TokenLogprob] = ()) -> list[Step]:
        part = self._open
        if part is None or not delta:
            return []
        part.text += delta
        part.logprobs.extend(logprobs)
        return [More(part, delta, [*logprobs])]

    def _done(self, item: wire.OutputItem) -> list[Step]:
        if self._open is None:
            if not isinstance(item, wire.MalformedToolCallOut):
                return []
            return [*self._opened("text"), *self._more(item.raw), *self._close()]
        rest: list[Step] = []
        if isinstance(item, wire.ToolCallOut) and not self._open.text:
            rest = self._more(wire.encode(item.arguments).decode())
        return [*rest, *self._close()]

    def _close(self) -> list[Step]:
        part, self._open = self._open, None
        assert part is not None
        return [Closed(part)]


def require_answer(turn: wire.Turn) -> None:
    """Raise what a turn without an answer failed of."""
    if turn.status == "failed" and turn.error is not None:
        raise failure(turn.error)
    if turn.status == "cancelled":
        raise Draining("the turn was cancelled before it ended")


def failure(body: wire.ErrorBody) -> AgentserveError:
    """Return the error of the catalogue that a turn failed of."""
    kind = CATALOGUE.get(body.code, EngineError)
    return kind(body.message, param=body.param, **body.details)


def answered(parts: list[Part]) -> Answered:
    """Return the parts as a client will re-send them."""
    return Answered(
        text=text_of(parts),
        calls=tuple(
            AskedCall(part.call_id, part.name, part.text) for part in parts if part.kind == "call"
        ),
    )


def text_of(parts: list[Part], kind: str = "text") -> str:
    """Return the joined text of one kind of part."""
    return "".join(part.text for part in parts if part.kind == kind)


def logprobs(tokens: Sequence[wire.TokenLogprob]) -> list[dict[str, Any]]:
    """Return log probabilities as OpenAI's clients have them."""
    return [_logprob(one) | {"top_logprobs": [_logprob(top) for top in one.top]} for one in tokens]


def _logprob(one: wire.TopLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": one.bytes}


async def gather(events: AsyncIterator[Step]) -> Ended:
    """Return the end of a turn. Raises what the turn failed of."""
    async for step in events:
        if isinstance(step, Ended):
            return step
    raise EngineError("the turn ended without a result")
