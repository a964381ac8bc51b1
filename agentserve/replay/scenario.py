"""The scenario format: a whole agent session as a TOML file (documented in scenarios/README.md)."""

import hashlib
import json
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from jsonschema import Draft202012Validator
from msgspec import Meta

from agentserve.wire import TOOL_NAME, Text, Tool, ToolCall

FORMAT = 1
LINE = 60  # characters of what is shown of a call or an answer
Seconds = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=1)]


class ScenarioError(ValueError):
    """A scenario file cannot be used; the message names the file and the place."""


class ScenarioTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the story. A `real` tool is the workspace's own tool of that name."""

    name: Annotated[str, Meta(pattern=TOOL_NAME)]
    description: str
    parameters: dict[str, Any]
    example: dict[str, Any] | None = None
    real: bool = False
    seconds: Seconds = 0.0  # how long a call takes at speed 1, when no turn says otherwise

    def declared(self) -> Tool:
        """Return what is sent to the server when the session is created."""
        return Tool(
            name=self.name,
            parameters=self.parameters,
            description=self.description,
            examples=[] if self.example is None else [self.example],
        )


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A forced call; with `result` its result is scripted, without it the tool really runs."""

    name: str
    arguments: dict[str, Any] = {}
    result: str | None = None

    @property
    def summary(self) -> str:
        """The call in one short line, for people."""
        values = (json.dumps(value, ensure_ascii=False) for value in self.arguments.values())
        return shorten(f"{self.name}({', '.join(values)})")


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that the model does not generate."""

    role: Literal["system", "user", "assistant"]
    content: str


class ScenarioTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn: what is said before it, and what the model is made to answer.

    The results of the turn before are fed first, then `said`, then `user`. A turn is forced (text,
    calls or both) or `free`, which leaves the answer to the model.
    """

    user: str | None = None
    said: list[Said] = []
    reset: bool = False  # all but the system prompt is forgotten before the turn: a compaction
    text: str = ""
    calls: list[Call] = []
    free: bool = False
    max_output_tokens: Count | None = None  # of a free answer
    tool_seconds: Seconds | None = None  # how long this turn's calls take at speed 1

    def forced(self) -> list[Text | ToolCall]:
        """Return the forced output as wire items (empty for a free turn)."""
        text: list[Text | ToolCall] = [Text(text=self.text)] if self.text else []
        return text + [ToolCall(name=call.name, arguments=call.arguments) for call in self.calls]

    @property
    def history(self) -> list[Said]:
        """What is said up to an assistant message: no news for the model, but its past."""
        ends = [place for place, one in enumerate(self.said, 1) if one.role == "assistant"]
        return self.said[: max(ends, default=0)]

    @property
    def summary(self) -> str:
        """The scripted answer in one short line, for people."""
        calls = ", ".join(call.summary for call in self.calls)
        return shorten(calls or " ".join(self.text.split()))

    @property
    def output_bytes(self) -> int:
        """UTF-8 bytes of the scripted answer: its text, and each call as a JSON object."""
        calls = ({"name": call.name, "arguments": call.arguments} for call in self.calls)
        lines = (json.dumps(call, ensure_ascii=False) for call in calls)
        return sum(len(part.encode()) for part in (self.text, *lines))


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A story that any server can be made to live through again."""

    format: int
    name: str
    description: str
    turns: Annotated[list[ScenarioTurn], Meta(min_length=1)]
    system: str | None = None
    tools: list[ScenarioTool] = []
    files: dict[str, str] = {}

    def tool(self, name: str) -> ScenarioTool | None:
        """Return the tool of that name, if the story has it."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def tool_seconds(self, turn: ScenarioTurn) -> float:
        """Return how long the turn's calls take at speed 1: they run at the same time."""
        if turn.tool_seconds is not None:
            return turn.tool_seconds
        tools = (self.tool(call.name) for call in turn.calls)
        return max((tool.seconds for tool in tools if tool), default=0.0)


def digest(scenarios: list[Scenario]) -> str:
    """Return 16 hex digits that are equal for equal work, whatever it is called."""
    work = [msgspec.structs.replace(one, name="", description="") for one in scenarios]
    return hashlib.sha256(msgspec.json.encode(work)).hexdigest()[:16]


def shorten(line: str) -> str:
    """Return the line, cut with dots where it is too long to follow."""
    return line if len(line) <= LINE else line[: LINE - 3] + "..."


def load_scenario(path: Path) -> Scenario:
    """Read and check a scenario file.

    Raises ScenarioError naming the file, the turn (from 1) and what is wrong there.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    if content.get("format") != FORMAT:
        found = content.get("format", "none")
        raise ScenarioError(f"{path}: format is {found}, this version reads format {FORMAT}")
    try:
        scenario = msgspec.convert(content, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{path}: {_place(str(error))}") from None
    try:
        check(scenario)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None
    return scenario


def _place(message: str) -> str:
    """Turn a path like `$.turns[6].calls[0].name` into "turn 7: calls[0].name"."""
    what, _, at = message.partition(" - at `$.")
    at = at.rstrip("`")
    if at.startswith("turns["):
        index, _, rest = at.removeprefix("turns[").partition("]")
        where = f"turn {int(index) + 1}" if index.isdigit() else "turns"
        return f"{where}: {rest.lstrip('.')}: {what}" if rest else f"{where}: {what}"
    return f"{at}: {what}" if at else what


def check(scenario: Scenario) -> None:
    """Raise ScenarioError when the story does not hold together."""
    for path in scenario.files:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ScenarioError(f"files: {path} leaves the workspace")
    for tool in scenario.tools:
        if tool.example is not None:
            _check_arguments(tool, tool.example, f"tool {tool.name}: its example")
    waiting = False
    for number, turn in enumerate(scenario.turns, start=1):
        where = f"turn {number}"
        if turn.user is None and not turn.said and (turn.reset or not waiting):
            raise ScenarioError(f"{where}: nothing to answer: no user text and no calls before it")
        if turn.history and number > 1 and not turn.reset:
            raise ScenarioError(f"{where}: an assistant message can be said at a beginning only")
        _check_turn(scenario, turn, where)
        waiting = bool(turn.calls) or turn.free


def _check_turn(scenario: Scenario, turn: ScenarioTurn, where: str) -> None:
    if turn.free == bool(turn.text or turn.calls):
        raise ScenarioError(f"{where}: give either text or calls, or free = true")
    for call in turn.calls:
        tool = scenario.tool(call.name)
        if tool is None:
            raise ScenarioError(f"{where}: {call.name} is not one of the tools")
        if call.result is None and not tool.real:
            raise ScenarioError(f"{where}: {call.name} is not a real tool: script its result")
        _check_arguments(tool, call.arguments, f"{where}: {call.name}")


def _check_arguments(tool: ScenarioTool, arguments: dict[str, Any], where: str) -> None:
    for error in Draft202012Validator(tool.parameters).iter_errors(arguments):
        raise ScenarioError(f"{where}: {error.message}")
