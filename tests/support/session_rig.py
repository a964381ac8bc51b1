"""A session service on a real engine and the hash oracle, in one event loop and in lockstep."""

import asyncio
import contextlib
import functools
import random
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

from agentserve import wire
from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings, ServerSettings
from agentserve.engine.grammars import Answer
from agentserve.engine.loop import Engine
from agentserve.engine.messages import Command, Down, Event, Ready, Submit
from agentserve.engine.oracle import OracleRunner
from agentserve.engine.plan import Runner
from agentserve.model.prepare import prepare
from agentserve.sessions.handle import TurnHandle
from agentserve.sessions.service import SessionService
from agentserve.sessions.session import Session
from agentserve.sessions.store import MemoryStore
from agentserve.sessions.text import ModelText, model_text
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import detect

ME = "local"
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"{name} something",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    }
    for name in ("search", "read", "write")
]


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.load(prepare("smollm2-135m"))


def checked_text(tokenizer: Tokenizer) -> ModelText:
    """Return a text side of which every extension is checked against the full render."""
    form = detect(tokenizer.chat_template)
    return model_text("smollm2-135m", tokenizer, form, check_rate=1.0, source=random.Random(0))


class AnyText:
    """A grammar compiler, its only grammar and its matcher, which constrain nothing."""

    ready = True
    size = 1
    broken = False

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def listen(self, wake: Callable[[], None]) -> None:
        return None

    def begin(self, job: int, spec: str) -> None:
        self._answers.append(Answer(job, self))

    def poll(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def end(self) -> None:
        return None

    def close(self) -> None:
        return None

    def matcher(self) -> "AnyText":
        return self

    def prepare(self) -> None:
        return None

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        return None


class LockstepLink:
    """An EngineLink whose engine steps when the service waits for events.

    With `hold` set the engine stands still until `steps` are granted.
    """

    def __init__(
        self,
        clock: VirtualClock,
        runner: Runner | None = None,
        engine: dict[str, Any] | None = None,
        **oracle: int,
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._settings = {"token_budget": 512, "check_invariants": True, **(engine or {})}
        self._oracle = {
            "vocab_size": 49152,
            "block_size": 16,
            "num_blocks": 2048,
            "max_context": 8192,
            "stop_id": 2,
            "stop_one_in": 40,
            **oracle,
        }
        self._outbox: list[Event] = []
        self._wake = asyncio.Event()
        self._incarnation = 0
        self.hold = False
        self.granted = 0
        self.sent: list[Command] = []
        self.edit: Callable[[Event], Event] | None = None  # changes what the engine says
        self.engine: Engine | None = None
        self.start()

    def start(self) -> None:
        """Start an engine that knows nothing."""
        self._incarnation += 1
        runner = self._runner or OracleRunner(**self._oracle)
        settings = EngineSettings(**self._settings)  # type: ignore[arg-type]
        self.engine = Engine(runner, self._clock, settings, AnyText())
        self._outbox.append(Ready(runner.info, self._incarnation))
        self._wake.set()

    def crash(self) -> None:
        """Lose the engine and everything in it."""
        self.engine = None
        self._outbox.append(Down("killed"))
        self._wake.set()

    def grant(self, steps: int) -> None:
        """Let a held engine run some steps."""
        self.granted += steps
        self._wake.set()

    def release(self) -> None:
        """Let the engine run."""
        self.hold = False
        self._wake.set()

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if self.engine is not None:
            self.engine.apply(command)
            self._wake.set()

    async def receive(self) -> list[Event]:
        while True:
            await asyncio.sleep(0)
            if self._outbox:
                events, self._outbox = self._outbox, []
                return events
            if self.engine is not None and self.engine.busy and (not self.hold or self.granted):
                self.granted = max(0, self.granted - 1)
                if events := self.engine.step():
                    return [self.edit(event) if self.edit else event for event in events]
                continue
            self._wake.clear()
            await self._wake.wait()

    async def close(self) -> None:
        self.engine = None

    def log(self, session: Session) -> "array[int]":
        """Return what the engine holds of a session."""
        assert self.engine is not None
        return self.engine._sequences[session.mirror.sequence].log

    def submits(self) -> list[Submit]:
        """Return the submits so far."""
        return [command for command in self.sent if isinstance(command, Submit)]


class Rig:
    """A service with short forms of its calls; bodies are given as JSON-like keyword arguments."""

    def __init__(
        self,
        settings: ServerSettings,
        store: MemoryStore,
        tokenizer: Tokenizer,
        runner: Runner | None = None,
        engine: dict[str, Any] | None = None,
        **oracle: int,
    ) -> None:
        self.clock = VirtualClock()
        self.link = LockstepLink(self.clock, runner, engine, **oracle)
        self.text = checked_text(tokenizer)
        self.store = store
        self.service = SessionService(
            self.link, self.text, store, settings, self.clock, random.Random(7)
        )

    def session(self, session_id: str, principal: str = ME) -> Session:
        return self.service._registry.get(principal, session_id)

    async def create(self, principal: str = ME, **body: Any) -> str:
        info, _ = await self.service.create(principal, convert(wire.CreateRequest, **body))
        return info.id

    async def start(self, session: str, text: Any = "hello", **body: Any) -> TurnHandle:
        request = convert(wire.TurnRequest, **{"input": text, "max_output_tokens": 8, **body})
        return await self.service.start_turn(ME, session, request)

    async def turn(self, session: str, text: Any = "hello", **body: Any) -> wire.Turn:
        return await (await self.start(session, text, **body)).result()

    async def forced(self, session: str, text: Any, *parts: Any, **body: Any) -> wire.Turn:
        """Run a turn whose output is given: strings are text, (name, arguments) is a call."""
        return await (await self.start_forced(session, text, *parts, **body)).result()

    async def start_forced(self, session: str, text: Any, *parts: Any, **body: Any) -> TurnHandle:
        force = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "tool_call", "name": part[0], "arguments": part[1]}
            for part in parts
        ]
        body = {"max_output_tokens": 256, "debug": {"force": force}, **body}
        return await self.start(session, text, **body)

    async def call(self, method: str, session: str, **body: Any) -> Any:
        """Call a service method that takes one request struct."""
        shape = {
            "patch": wire.PatchRequest,
            "tool_results": wire.ToolResultsRequest,
            "fork": wire.ForkRequest,
            "rollback": wire.RollbackRequest,
            "history": wire.HistoryRequest,
            "count": wire.CountRequest,
            "cancel": wire.CancelRequest,
        }[method]
        return await getattr(self.service, method)(ME, session, convert(shape, **body))

    async def tokens(self, session: str) -> list[int]:
        answer = await self.service.transcript(ME, session, "tokens")
        assert isinstance(answer, dict)
        return list(answer["tokens"])

    async def settle(self, turns: int = 200) -> None:
        """Let everything that is due run."""
        for _ in range(turns):
            await asyncio.sleep(0)

    async def steps(self, count: int) -> None:
        """Let a held engine run `count` steps."""
        self.link.grant(count)
        await self.settle()


def convert(shape: Any, **body: Any) -> Any:
    """Return a request as the server would decode it."""
    return wire.decode(wire.encode(body), shape)


def result(call_id: str, output: Any = "done", **fields: Any) -> dict[str, Any]:
    """Return a tool result item."""
    return {"type": "tool_result", "call_id": call_id, "output": output, **fields}


def calls(turn: wire.Turn) -> list[str]:
    """Return the call ids of a turn's output."""
    return [item.call_id for item in turn.output if isinstance(item, wire.ToolCallOut)]


@contextlib.asynccontextmanager
async def rig(
    *,
    store: MemoryStore | None = None,
    oracle: dict[str, int] | None = None,
    tokenizer: Tokenizer | None = None,
    runner: Runner | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Run a service for the length of a test, with SmolLM2's text side unless another is given.

    The engine runs the hash oracle, or `runner`, which no restart of the engine can replace.
    """
    server = ServerSettings(allow_force=True, **settings)
    store, tokenizer = store or MemoryStore(), tokenizer or smollm2_tokenizer()
    made = Rig(server, store, tokenizer, runner, engine, **(oracle or {}))
    pump = asyncio.create_task(made.service.driver.pump())
    await made.settle(10)
    try:
        yield made
    finally:
        pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pump
        await made.service.close()
