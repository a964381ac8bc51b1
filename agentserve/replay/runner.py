"""Replays scenarios on the session API: a closed loop per session, all at the same time."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from agentserve_tools import ToolOutput

from agentserve import wire
from agentserve.client.aio import AsyncClient, AsyncSession
from agentserve.client.models import SessionOptions
from agentserve.errors import AgentserveError, InvalidRequest
from agentserve.replay.report import Played, Report, Run, TurnRecord
from agentserve.replay.scenario import Call, Said, Scenario, ScenarioTurn, digest, shorten
from agentserve.replay.tools import StoryTools, lasting
from agentserve.replay.workspace import Workspace

FREE_TOKENS = 64  # of a free answer, when the scenario sets no bound
CALL_BYTES = 64  # more than a template writes around a call
QUOTED = 200  # characters of an answer that are shown where it differs
NO_FORCE = "start the server with --allow-force, or replay with --free"
CALLS = (wire.ToolCallOut, wire.MalformedToolCallOut)
OUTPUT_EVENTS = (
    wire.ItemStarted,
    wire.TextDelta,
    wire.ReasoningDelta,
    wire.ToolCallDelta,
    wire.ItemDone,
)


class ReplayError(ValueError):
    """The replay cannot go on: the server and the story do not fit."""


class OtherAnswer(ReplayError):
    """The server did not answer what was forced; ends one session."""


class ReplaySettings(msgspec.Struct, frozen=True):
    """How a replay runs. Real tools always take their own time at least."""

    speed: float = 1.0  # the story's tool seconds are divided by it
    free: bool = False  # every answer is left to the model
    api_key: str | None = None
    lengths: dict[tuple[int, int], int] = {}  # (session, turn) -> tokens, where nothing is forced


class Observer(Protocol):
    """Follows a replay while it runs."""

    def heard(self, user: str) -> None:
        """Take what the user says before a turn."""
        ...

    def turn(self, record: TurnRecord) -> None:
        """Take a finished turn."""
        ...


class Plays(Protocol):
    """Plays one scenario; `failure` says why it ended before its end."""

    records: list[TurnRecord]
    failure: str

    async def play(self) -> None:
        """Play to the end, or until the server refuses or fails a turn."""
        ...


async def replay(
    scenarios: list[Scenario], url: str, settings: ReplaySettings, observer: Observer
) -> Report:
    """Play every scenario in a session of its own and return what was measured.

    Raises ReplayError when the server does not take forced outputs, and when no session finished a
    single turn.
    """
    async with AsyncClient(url, api_key=settings.api_key) as client:
        players = [
            Player(client, scenario, number, settings, observer)
            for number, scenario in enumerate(scenarios, start=1)
        ]
        report = await play_all(players, scenarios, settings)
    return msgspec.structs.replace(report, run=Run("session", url))


async def play_all(
    players: Sequence[Plays], scenarios: list[Scenario], settings: ReplaySettings
) -> Report:
    """Let all play at the same time.

    Raises what the first player raises, and ReplayError when no session finished a single turn.
    """
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for player in players:
                group.create_task(player.play())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    records = [record for player in players for record in player.records]
    failures = [player.failure for player in players if player.failure]
    if not records:
        raise ReplayError(failures[0])
    return Report(
        scenario=scenarios[0].name,
        records=records,
        makespan_s=time.perf_counter() - started,
        incomplete=failures,
        work=Played(
            digest=digest(scenarios),
            sessions=len(scenarios),
            turns=sum(len(scenario.turns) for scenario in scenarios),
            speed=None if math.isinf(settings.speed) else settings.speed,
            free=settings.free,
        ),
    )


class Player:
    """Lives through one scenario in one session."""

    def __init__(
        self,
        client: AsyncClient,
        scenario: Scenario,
        number: int,
        settings: ReplaySettings,
        observer: Observer,
    ) -> None:
        self.records: list[TurnRecord] = []
        self.failure = ""
        self._client = client
        self._scenario = scenario
        self._number = number
        self._settings = settings
        self._observer = observer

    async def play(self) -> None:
        """Play to the end, or until the server refuses, fails or misreads a turn."""
        try:
            system = self._scenario.system
            options: SessionOptions = {} if system is None else {"system": system}
            tools = [tool.declared() for tool in self._scenario.tools]
            session = await self._client.session(tools=tools, **options)
            with Workspace(self._scenario.files) as workspace:
                await self._story(session, StoryTools(self._scenario, workspace))
            await session.delete()
        except AgentserveError as error:
            self.failure = f"{self._place}: {error.code}: {error}"
        except OtherAnswer as error:
            self.failure = f"{self._place}: {error}"

    @property
    def _place(self) -> str:
        return f"session {self._number}, turn {len(self.records) + 1}"

    async def _story(self, session: AsyncSession, tools: StoryTools) -> None:
        feed: list[wire.Item] = []
        for index, turn in enumerate(self._scenario.turns, start=1):
            history = turn.history
            if turn.reset or history:
                await session.rewrite([_item(said) for said in history])
                feed = []
            feed += [_item(said) for said in turn.said[len(history) :]]
            if turn.user is not None:
                self._observer.heard(turn.user)
                feed.append(wire.UserItem(content=turn.user))
            answer, ttft, latency = await self._generate(session, turn, feed)
            started = time.perf_counter()
            feed = await self._results(turn, answer, tools)
            record = _record(answer, ttft, latency, time.perf_counter() - started)
            record = msgspec.structs.replace(record, session=self._number, index=index)
            self.records.append(record)
            self._observer.turn(record)

    async def _generate(
        self, session: AsyncSession, turn: ScenarioTurn, feed: list[wire.Item]
    ) -> tuple[wire.Turn, float, float]:
        """Return the finished turn, the seconds to its first output and to its end."""
        free = self._settings.free or turn.free
        options: dict[str, Any] = (
            {"max_output_tokens": turn.max_output_tokens or FREE_TOKENS}
            if free
            else {
                "debug": wire.Debug(force=turn.forced()),
                "max_output_tokens": _room(turn),
            }
        )
        started = time.perf_counter()
        first: float | None = None
        try:
            async with session.stream(feed, **options) as events:
                async for event in events:
                    if first is None and isinstance(event, OUTPUT_EVENTS):
                        first = time.perf_counter() - started
        except InvalidRequest as error:
            if free or "debug" not in f"{error.param} {error.message}":
                raise
            raise ReplayError(f"{error.message}: {NO_FORCE}") from None
        latency = time.perf_counter() - started
        if events.turn is None:
            raise ReplayError("the stream ended without its turn")
        answer = events.turn.wire
        if not free:
            _compare(turn, answer)
        return answer, latency if first is None else first, latency

    async def _results(
        self, turn: ScenarioTurn, answer: wire.Turn, tools: StoryTools
    ) -> list[wire.Item]:
        """Run the turn's calls and return what the next turn is fed."""
        seconds = self._scenario.tool_seconds(turn) / self._settings.speed
        return await lasting(seconds, self._outcome(turn, answer, tools))

    async def _outcome(
        self, turn: ScenarioTurn, answer: wire.Turn, tools: StoryTools
    ) -> list[wire.Item]:
        called = [item for item in answer.output if isinstance(item, CALLS)]
        if not self._settings.free and not turn.free:
            outputs = await tools.scripted(turn.calls)
            return [_result(call.call_id, out) for call, out in zip(called, outputs, strict=True)]
        if called:
            outputs = await tools.free([_chosen(call) for call in called])
            return [_result(call.call_id, out) for call, out in zip(called, outputs, strict=True)]
        outputs = await tools.scripted(turn.calls)
        return [
            wire.UserItem(content=f"{call.summary} gives:\n{out.output}")
            for call, out in zip(turn.calls, outputs, strict=True)
        ]


def _chosen(call: wire.ToolCallOut | wire.MalformedToolCallOut) -> tuple[str, Any]:
    """Return the name and arguments of a call of the model's own."""
    if isinstance(call, wire.ToolCallOut):
        return call.name, call.arguments
    return call.name or "unreadable", None


def _result(call_id: str, output: ToolOutput) -> wire.ToolResultItem:
    return wire.ToolResultItem(
        call_id=call_id,
        output=output.output,
        status=output.status,
        duration_ms=output.duration_ms,
    )


def _item(said: Said) -> wire.Item:
    match said.role:
        case "system":
            return wire.SystemItem(content=said.content)
        case "user":
            return wire.UserItem(content=said.content)
        case "assistant":
            return wire.AssistantItem(content=said.content)


def _room(turn: ScenarioTurn) -> int:
    """Return a bound that the forced output never reaches: a token has at least one byte."""
    return turn.output_bytes + CALL_BYTES * (len(turn.calls) + 1)


def _compare(turn: ScenarioTurn, answer: wire.Turn) -> None:
    """Raise OtherAnswer when the server did not answer what was forced."""
    got = [_chosen(item) for item in answer.output if isinstance(item, CALLS)]
    if got != [(call.name, call.arguments) for call in turn.calls]:
        raise OtherAnswer(f"the server made {_cut(got)} of the story's {_cut(turn.calls)}")
    if (text := _text(answer).strip()) != turn.text.strip():
        raise OtherAnswer(f"the server made {_cut(text)} of the story's {_cut(turn.text)}")


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."


def _text(answer: wire.Turn) -> str:
    return "".join(item.text for item in answer.output if isinstance(item, wire.TextOut))


def _record(answer: wire.Turn, ttft: float, latency: float, tools: float) -> TurnRecord:
    usage, timing = answer.usage, answer.timing_ms
    return TurnRecord(
        session=0,
        index=0,
        action=action_line(answer),
        input_tokens=usage.input_tokens,
        new_tokens=usage.new_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        ttft_s=ttft,
        latency_s=latency,
        queue_s=waited_ms(timing) / 1000,
        restore_s=timing.restore / 1000,
        model_s=(timing.prefill + timing.decode) / 1000,
        tool_s=tools,
        recomputed={part.reason: part.tokens for part in usage.recomputed},
        restored_tokens=answer.kv.host,
    )


def waited_ms(timing: wire.Timing) -> int:
    """Return the milliseconds before the turn's own prefill.

    The engine's queue starts when it reads the command, which it does between two steps: a turn
    that comes while others are in a step has waited already. The time to the first token has both.
    """
    before = timing.ttft - timing.restore - timing.prefill if timing.ttft else 0
    return max(timing.queue, before)


def action_line(answer: wire.Turn) -> str:
    """Say in one line what the model did, and where it was cut."""
    parts = []
    for item in answer.output:
        if isinstance(item, wire.ToolCallOut):
            parts.append(Call(item.name, item.arguments).summary)
        elif isinstance(item, wire.MalformedToolCallOut):
            what = "unfinished" if item.error == "truncated" else "unreadable"
            parts.append(f"{what} call {' '.join(item.raw.split())}")
    if not parts:
        parts = [" ".join(_text(answer).split())]
    action = shorten(", ".join(parts))
    if answer.stop_reason == "max_tokens":
        return f"{action} (cut at {answer.usage.output_tokens} tokens)"
    return action
