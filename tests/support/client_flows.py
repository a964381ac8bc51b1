"""Drives the client's flows from a script: what each effect is answered with."""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from agentserve import wire
from agentserve.client import core
from agentserve.client.session import SessionCore
from agentserve.client.tools import Tools

CONTEXT = wire.Context(used=10, limit=100, left=90)


class Script:
    """Answers the effects of a flow from a list, and keeps the effects.

    An answer is what the driver would send, an exception that it would throw, or a function of the
    effect that gives either. Sleep and Close are answered by themselves.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.effects: list[core.Effect] = []
        self.slept: list[float] = []

    def drive(self, flow: core.Flow[Any]) -> Any:
        """Run the flow to its end and return its result."""
        answer: Any = None
        while True:
            try:
                thrown = isinstance(answer, BaseException)
                effect = flow.throw(answer) if thrown else flow.send(answer)
            except StopIteration as done:
                return done.value
            self.effects.append(effect)
            answer = self._answer(effect)

    def _answer(self, effect: core.Effect) -> Any:
        if isinstance(effect, core.Sleep):
            self.slept.append(effect.seconds)
            return None
        if isinstance(effect, core.Close | core.StopTools):
            return None
        answer = self.answers.pop(0)
        return answer(effect) if isinstance(answer, Callable) else answer

    @property
    def sent(self) -> list[core.Send]:
        """The requests, in order."""
        return [effect for effect in self.effects if isinstance(effect, core.Send)]

    def bodies(self) -> list[Any]:
        """The JSON bodies of the requests."""
        return [msgspec.json.decode(send.body or b"null") for send in self.sent]


def ok(value: Any, **headers: str) -> core.Reply:
    """Return an answer of success."""
    return core.Reply(200, headers, msgspec.json.encode(value))


def refused(status: int, code: str, message: str = "no", **headers: str) -> core.Reply:
    """Return an error answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = wire.ErrorBody(code, message, status in (429, 503), "input", {"limit": 5})
    return core.Reply(status, named, msgspec.json.encode(wire.ErrorAnswer(body)))


def opened(**headers: str) -> core.Reply:
    """Return an answer whose body is a stream."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return core.Reply(200, named, stream="stream")


def frames(*events: wire.Event, first: int = 1) -> bytes:
    """Return events as the server sends them."""
    return b"".join(
        b"id: %d\ndata: %s\n\n" % (number, wire.encode(event))
        for number, event in enumerate(events, start=first)
    )


def turn(number: int = 1, **fields: Any) -> wire.Turn:
    """Return a completed turn."""
    named = {"status": "completed", "stop_reason": "end", **fields}
    return wire.Turn(f"t_{number}", "s", None, context=CONTEXT, **named)


def session_info(head: str | None = None) -> wire.SessionInfo:
    """Return a session that is idle."""
    return wire.SessionInfo(
        id="s",
        state="idle",
        head=head,
        turns=0,
        model="m",
        created_at=0,
        last_active_at=0,
        expires_at=None,
        pending_calls=[],
        context=CONTEXT,
        kv=wire.KvTokens(),
        usage=wire.Usage(),
        metadata={},
    )


def api() -> core.Api:
    """Return an Api with fixed randomness."""
    return core.Api(rng=random.Random(0))


def session(*tools: Any, head: str | None = None) -> SessionCore:
    """Return a session's core."""
    return SessionCore(api(), session_info(head), Tools(tools))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call_item(name: str, arguments: dict[str, Any], number: int = 1) -> wire.ToolCallOut:
    """Return a call as an item of a turn's output."""
    return wire.ToolCallOut(f"i_{number}", f"call_{number}", name, arguments)


BROKEN = wire.MalformedToolCallOut("i_9", "call_9", "{oops", "not JSON")
