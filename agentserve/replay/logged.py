"""What an agent's log says, whatever its format, and the story that a replay makes of it."""

import json
import math
import re
from collections import Counter
from typing import Any, Literal

import msgspec

from agentserve.replay.scenario import FORMAT, Call, Said, Scenario, ScenarioTool, ScenarioTurn
from agentserve.wire import TOOL_NAME

NO_RESULT = "(The log has no result of this call.)"
NAME_LENGTH = 64
DESCRIPTION_LENGTH = 16384  # what the session API takes
_INT_LIMIT = 2**63
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}

# What the import changed or left out, for people; each is counted.
EMPTY = "answers without words and calls, left out"
THINKING = "answers whose thinking is left out"
UNANSWERED = "calls without a result, answered with a remark"
ORPHANS = "tool results without their call, left out"
JOINED = "answers that follow another at once, joined to it"
CUT = "tool waits cut to --max-wait"
UNTIMED = "tool waits that the log does not know, taken as --tool-seconds"
UNFINISHED = "messages after the last answer, left out"
RENAMED = "calls of tools whose names no API takes, renamed"


Role = Literal["system", "user", "assistant", "tool"]


class BadLine(ValueError):
    """A line of a log cannot be used."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")


class LoggedCall(msgspec.Struct):
    """A tool call of the log; the result is found later."""

    id: str
    name: str
    arguments: dict[str, Any]
    result: str | None = None
    seconds: float | None = None  # from the call to its result


class Logged(msgspec.Struct):
    """One message of the log, in the order in which the model read or wrote them."""

    role: Role
    text: str = ""
    calls: list[LoggedCall] = []
    call_id: str = ""  # of a tool's result; "": of the oldest call that waits
    at: float | None = None  # seconds on any clock
    seconds: float | None = None  # that a tool took, where the log says so itself
    thinking: bool = False
    reset: bool = False  # a compaction: what was before this message left the prompt


class Limits(msgspec.Struct, frozen=True):
    """How a log's waits become a story's, in seconds, and how many turns are taken."""

    max_wait: float = 60.0  # a longer wait was for a person who had to allow the call
    tool_seconds: float = 0.0  # of a call whose time the log does not have
    turns: int | None = None


class _Turn(msgspec.Struct):
    said: list[Said]
    reset: bool
    text: str
    calls: list[LoggedCall]
    at: float | None


def story(
    name: str, messages: list[Logged], tools: list[ScenarioTool], limits: Limits
) -> tuple[Scenario | None, Counter[str]]:
    """Return the messages as a scenario, and what had to be changed; None without any answer."""
    reader = _Reader()
    for message in messages:
        reader.read(message)
    notes = reader.notes
    if reader.said:
        notes[UNFINISHED] += len(reader.said)
    turns = reader.turns[: limits.turns]
    if not turns:
        return None, notes
    declared, names = _tools(tools, turns, notes)
    scenario = Scenario(
        format=FORMAT,
        name=name,
        description="imported from a log",
        system=reader.system,
        tools=declared,
        turns=[
            _scenario_turn(turn, names, limits, notes, last=turn is turns[-1]) for turn in turns
        ],
    )
    return scenario, +notes


class _Reader:
    """Puts messages together to turns."""

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()
        self.system: str | None = None
        self.turns: list[_Turn] = []
        self.said: list[Said] = []  # since the last answer
        self._reset = False  # a compaction since the last answer
        self._fed = False  # a tool result since the last answer
        self._waiting: dict[str, tuple[LoggedCall, float | None]] = {}

    def read(self, message: Logged) -> None:
        """Take the next message."""
        if message.reset:
            self._reset, self._fed, self.said = bool(self.turns), False, []
        match message.role:
            case "assistant":
                self._answer(message)
            case "tool":
                self._result(message)
            case role:
                if role == "system" and self.system is None and not self.turns and not self.said:
                    self.system = message.text
                else:
                    self.said.append(Said(role, message.text))

    def _answer(self, message: Logged) -> None:
        self.notes[THINKING] += message.thinking
        if not message.text.strip() and not message.calls:
            self.notes[EMPTY] += 1
            return
        begins = not self.turns or self._reset
        if begins and not any(said.role == "user" for said in self.said):
            # Nobody asked: a greeting, or a log that begins in the middle.
            if message.text.strip():
                self.said.append(Said("assistant", message.text))
            return
        if not begins and not self.said and not self._fed:
            self._join(message)
        else:
            turn = _Turn(self.said, self._reset, message.text, list(message.calls), message.at)
            self.turns.append(turn)
            self.said, self._reset, self._fed, self._waiting = [], False, False, {}
        for call in message.calls:
            self._waiting[call.id] = (call, message.at)

    def _join(self, message: Logged) -> None:
        self.notes[JOINED] += 1
        turn = self.turns[-1]
        turn.text = "\n\n".join(text for text in (turn.text, message.text) if text)
        turn.calls += message.calls

    def _result(self, message: Logged) -> None:
        found = message.call_id or next(iter(self._waiting), "")
        call, called = self._waiting.pop(found, (None, None))
        if call is None:
            self.notes[ORPHANS] += 1
            return
        call.result = message.text
        call.seconds = message.seconds
        if call.seconds is None and message.at is not None and called is not None:
            call.seconds = max(message.at - called, 0.0)
        self._fed = True


def _scenario_turn(
    turn: _Turn, names: dict[str, str], limits: Limits, notes: Counter[str], last: bool
) -> ScenarioTurn:
    calls = [
        Call(names[call.name], call.arguments, NO_RESULT if call.result is None else call.result)
        for call in turn.calls
    ]
    if not last:
        notes[UNANSWERED] += sum(call.result is None for call in turn.calls)
    return ScenarioTurn(
        said=turn.said,
        reset=turn.reset,
        text=turn.text,
        calls=calls,
        tool_seconds=0.0 if last else _wait(turn.calls, limits, notes),
    )


def _wait(calls: list[LoggedCall], limits: Limits, notes: Counter[str]) -> float:
    """Return how long the turn's calls take: they run at the same time."""
    if not calls:
        return 0.0
    known = [call.seconds for call in calls if call.seconds is not None]
    if not known:
        notes[UNTIMED] += 1
        return limits.tool_seconds
    if max(known) > limits.max_wait:
        notes[CUT] += 1
    return min(max(known), limits.max_wait)


def _tools(
    declared: list[ScenarioTool], turns: list[_Turn], notes: Counter[str]
) -> tuple[list[ScenarioTool], dict[str, str]]:
    """Return the declared tools and those that are only called, and the name to use for each."""
    tools: dict[str, ScenarioTool] = {}
    for tool in declared:
        tools.setdefault(tool.name, tool)
    used: dict[str, list[LoggedCall]] = {}
    for turn in turns:
        for call in turn.calls:
            used.setdefault(call.name, []).append(call)
    names: dict[str, str] = {}
    for name, calls in used.items():
        names[name] = _usable(name)
        notes[RENAMED] += len(calls) if names[name] != name else 0
        if names[name] not in tools:
            tools[names[name]] = _inferred(names[name], calls)
    return list(tools.values()), names


def _inferred(name: str, calls: list[LoggedCall]) -> ScenarioTool:
    """Return a declaration with what the calls show: the arguments' names and types."""
    properties: dict[str, dict[str, Any]] = {}
    for call in calls:
        for key, value in call.arguments.items():
            kind = _TYPES.get(type(value))
            found = {"type": kind} if kind else {}
            properties[key] = found if properties.get(key, found) == found else {}
    return ScenarioTool(
        name=name, description="", parameters={"type": "object", "properties": properties}
    )


def declared_tool(tool: Any) -> ScenarioTool | None:
    """Return a tool of an OpenAI (chat or responses) or Anthropic request; None for other kinds."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not isinstance(name := inner.get("name"), str):
        return None
    parameters = inner.get("parameters") or inner.get("input_schema") or {}
    return ScenarioTool(
        name=_usable(name),
        description=str(inner.get("description") or "")[:DESCRIPTION_LENGTH],
        parameters=parameters
        if isinstance(parameters, dict) and parameters
        else {"type": "object"},
    )


def _usable(name: str) -> str:
    """Return the name with other characters than APIs take replaced, and cut to their length."""
    if re.fullmatch(TOOL_NAME, name):
        return name
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:NAME_LENGTH] or "tool"


def parse_json(text: str) -> Any:
    """Return a JSON value in which every number and text is one that can be sent on.

    Raises ValueError, and RecursionError for what is nested too deep.
    """
    value = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_no_number)
    if _SURROGATE.search(text):  # half of a cut pair is legal in JSON, but is no text
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def _int(digits: str) -> int | float:
    number = int(digits)
    return number if -_INT_LIMIT <= number < _INT_LIMIT else _float(digits)


def _float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError("a number is too large")
    return number


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
