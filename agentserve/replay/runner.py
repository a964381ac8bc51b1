"""Replays scenarios over HTTP: a closed loop per session, all sessions at the same time."""

import asyncio
import time
from typing import Protocol

import msgspec

from agentserve import wire
from agentserve.client import AsyncClient, AsyncSession
from agentserve.errors import AgentserveError, InvalidRequest
from agentserve.replay.report import Report, TurnRecord
from agentserve.replay.scenario import Call, Scenario, ScenarioTurn
from agentserve.replay.tools import StoryTools
from agentserve.replay.workspace import Workspace
from agentserve_tools import ToolOutput

FREE_TOKENS = 64  # of a free answer, when the scenario sets no bound


class ReplayError(ValueError):
    """The replay cannot go on: the server and the story do not fit."""


class ReplaySettings(msgspec.Struct, frozen=True):
    """How a replay runs. Real tools always take their own time at least."""

    speed: float = 1.0  # the story's tool seconds are divided by it
    free: bool = False  # every answer is left to the model
    api_key: str | None = None


class Observer(Protocol):
    """Follows a replay while it runs."""

    def heard(self, user: str) -> None:
        """Take what the user says before a turn."""
        ...

    def turn(self, record: TurnRecord) -> None:
        """Take a finished turn."""
        ...


async def replay(
    scenarios: list[Scenario], url: str, settings: ReplaySettings, observer: Observer
) -> Report:
    """Play every scenario in a session of its own and return what was measured.

    Raises ReplayError when the server does not take forced outputs or answers other ones, and
    AgentserveError when no session finished a single turn.
    """
    started = time.perf_counter()
    async with AsyncClient(url, api_key=settings.api_key) as client:
        players = [
            Player(scenario, number, settings, observer)
            for number, scenario in enumerate(scenarios, start=1)
        ]
        async with asyncio.TaskGroup() as group:
            for player in players:
                group.create_task(player.play(client))
    records = [record for player in players for record in player.records]
    failures = [player.failure for player in players if player.failure]
    if not records:
        raise ReplayError(failures[0])
    return Report(
        scenario=scenarios[0].name,
        records=records,
        makespan_s=time.perf_counter() - started,
        incomplete=failures,
    )


class Player:
    """Lives through one scenario in one session."""

    def __init__(
        self, scenario: Scenario, number: int, settings: ReplaySettings, observer: Observer
    ) -> None:
        self.records: list[TurnRecord] = []
        self.failure = ""
        self._scenario = scenario
        self._number = number
        self._settings = settings
        self._observer = observer

    async def play(self, client: AsyncClient) -> None:
        """Play to the end, or until the server refuses or fails a turn (`failure` says why)."""
        try:
            async with client.session(
                system=self._scenario.system,
                tools=[tool.declared() for tool in self._scenario.tools],
            ) as session:
                with Workspace(self._scenario.files) as workspace:
                    await self._story(session, StoryTools(self._scenario, workspace))
        except AgentserveError as error:
            place = f"session {self._number}, turn {len(self.records) + 1}"
            self.failure = f"{place}: {error.code}: {error}"

    async def _story(self, session: AsyncSession, tools: StoryTools) -> None:
        feed: list[wire.Item] = []
        for index, turn in enumerate(self._scenario.turns, start=1):
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
