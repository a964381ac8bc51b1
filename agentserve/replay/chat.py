"""Replays scenarios on any OpenAI-compatible endpoint, as a client without a session does.

Each turn sends the whole history. The answer is generated and measured, and then the story's own
answer goes into the history: what a turn asks is the same on every endpoint.
"""

import json
import time
from typing import Any

import msgspec
from agentserve_tools import ToolOutput

from agentserve.replay.endpoint import Answer, Endpoint, EndpointError
from agentserve.replay.report import Report, Run, TurnRecord
from agentserve.replay.runner import Observer, ReplayError, ReplaySettings, play_all
from agentserve.replay.scenario import Scenario, ScenarioTool, ScenarioTurn
from agentserve.replay.tools import StoryTools, lasting
from agentserve.replay.workspace import Workspace

BYTES_PER_TOKEN = 4  # of output, where nobody has counted the tokens
PHASES = frozenset(("queue_s", "restore_s", "model_s", "server_s", "recomputed", "restored_tokens"))
# What a report cannot tell without a count of the endpoint's.
NEEDS = {
    "input_tokens": ("input_tokens", "new_tokens", "stateless_prefill", "prefill_computed"),
    "cached_tokens": ("cached_tokens", "prefill_computed"),
    "output_tokens": ("output_tokens",),
}


async def replay_chat(
    scenarios: list[Scenario], endpoint: Endpoint, settings: ReplaySettings, observer: Observer
) -> Report:
    """Play every scenario as a conversation of its own and return what was measured.

    Raises ReplayError when the endpoint cannot be used, when a turn has no answer to go on with,
    and when no session finished a single turn.
    """
    if settings.free or any(turn.free for scenario in scenarios for turn in scenario.turns):
        raise ReplayError("the chat dialect goes on with the story's own answers: none may be free")
    try:
        async with endpoint:
            await endpoint.choose_model()
            players = [
                ChatPlayer(endpoint, scenario, number, settings, observer)
                for number, scenario in enumerate(scenarios, start=1)
            ]
            report = await play_all(players, scenarios, settings)
    except EndpointError as error:
        raise ReplayError(str(error)) from None
    reported = set[str]().union(*(player.reported for player in players))
    unknown = {field for name, fields in NEEDS.items() if name not in reported for field in fields}
    run = Run("chat", endpoint.address, endpoint.model or "")
    return msgspec.structs.replace(report, run=run, unknown=PHASES | unknown)


class ChatPlayer:
    """Lives through one scenario, with the history in the client."""

    def __init__(
        self,
        endpoint: Endpoint,
        scenario: Scenario,
        number: int,
        settings: ReplaySettings,
        observer: Observer,
    ) -> None:
        self.records: list[TurnRecord] = []
        self.failure = ""
        self.reported: set[str] = set()  # counts that the endpoint gives
        self._endpoint = endpoint
        self._scenario = scenario
        self._number = number
        self._settings = settings
        self._observer = observer
        self._tools = [declaration(tool) for tool in scenario.tools]

    async def play(self) -> None:
        """Play to the end, or until the endpoint refuses or fails a turn (`failure` says why)."""
        try:
            with Workspace(self._scenario.files) as workspace:
                await self._story(StoryTools(self._scenario, workspace))
        except EndpointError as error:
            self.failure = f"session {self._number}, turn {len(self.records) + 1}: {error}"

    async def _story(self, tools: StoryTools) -> None:
        messages = self._beginning()
        before = 0  # tokens of the last prompt
        for index, turn in enumerate(self._scenario.turns, start=1):
            if turn.reset:
                messages, before = self._beginning(), 0
            messages += said(turn)
            if turn.user is not None:
                self._observer.heard(turn.user)
            asked = self._settings.lengths.get((self._number, index)) or estimated_tokens(turn)
            answer = await self._endpoint.complete(messages, self._tools, asked)
            self.reported |= {name for name in NEEDS if getattr(answer, name) is not None}
            started = time.perf_counter()
            seconds = self._scenario.tool_seconds(turn) / self._settings.speed
            outputs = await lasting(seconds, tools.scripted(turn.calls))
            messages += [answered(turn, index), *results(index, outputs)]
            record = _record(turn, answer, before, asked, time.perf_counter() - started)
            record = msgspec.structs.replace(record, session=self._number, index=index)
            self.records.append(record)
            self._observer.turn(record)
            before = record.input_tokens

    def _beginning(self) -> list[dict[str, Any]]:
        system = self._scenario.system
        return [] if system is None else [{"role": "system", "content": system}]


def estimated_tokens(turn: ScenarioTurn) -> int:
    """Return about how many tokens the story's answer has, without its model's tokenizer."""
    return -(-turn.output_bytes // BYTES_PER_TOKEN)


def declaration(tool: ScenarioTool) -> dict[str, Any]:
    """Return the tool as a request of the chat dialect has it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def said(turn: ScenarioTurn) -> list[dict[str, Any]]:
    """Return the messages before the turn's answer."""
    messages = [{"role": one.role, "content": one.content} for one in turn.said]
    return messages + ([] if turn.user is None else [{"role": "user", "content": turn.user}])


def answered(turn: ScenarioTurn, index: int) -> dict[str, Any]:
    """Return the story's answer as an assistant message."""
    if not turn.calls:
        return {"role": "assistant", "content": turn.text}
    calls = [
        {
            "id": _call_id(index, number),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for number, call in enumerate(turn.calls)
    ]
    return {"role": "assistant", "content": turn.text or None, "tool_calls": calls}


def results(index: int, outputs: list[ToolOutput]) -> list[dict[str, Any]]:
    """Return the messages that answer the turn's calls, in their order."""
    return [
        {
            "role": "tool",
            "tool_call_id": _call_id(index, number),
            "content": output.output
            if isinstance(output.output, str)
            else json.dumps(output.output, ensure_ascii=False),
        }
        for number, output in enumerate(outputs)
    ]


def _call_id(index: int, number: int) -> str:
    """Return an id of nine letters and digits, which is what Mistral's templates demand."""
    return f"c{index % 100_000:05d}{number % 1000:03d}"


def _record(
    turn: ScenarioTurn, answer: Answer, before: int, asked: int, tools_s: float
) -> TurnRecord:
    prompt = answer.input_tokens or 0
    return TurnRecord(
        session=0,
        index=0,
        action=turn.summary,
        input_tokens=prompt,
        new_tokens=max(prompt - before, 0),
        cached_tokens=answer.cached_tokens or 0,
        output_tokens=answer.output_tokens or 0,
        ttft_s=answer.ttft_s,
        latency_s=answer.latency_s,
        tool_s=tools_s,
        asked_tokens=asked,
    )
