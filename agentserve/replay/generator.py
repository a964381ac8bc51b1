"""Seeded synthetic agents: sessions that differ in their words and gaps, equal in their sizes."""

import random

import msgspec

from agentserve.replay.scenario import FORMAT, Call, Scenario, ScenarioTool, ScenarioTurn

# Short common words: one token each in the usual English vocabularies, after a space.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member "
    "law car city community name team minute idea body information back parent face level office "
    "door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education"
)
WORDS = tuple(_COMMON.split())

# Tokens of `{"name": "work", "arguments": {"topic": ""}}` beside the words inside.
CALL_TOKENS = 15
TOOL = ScenarioTool(
    name="work",
    description="Look something up.",
    parameters={
        "type": "object",
        "properties": {"topic": {"type": "string"}},
        "required": ["topic"],
    },
    example={"topic": "home"},
)


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to generate. Sizes are words, which are tokens up to the template's own."""

    sessions: int = 4
    turns: int = 20
    prompt: int = 1250  # system prompt, the same in every session
    new: int = 175  # what each turn adds: the user's first message, then tool results
    first: int = 0  # the user's first message, where it is of another size than `new`
    output: int = 32  # of each turn, a tool call; at least CALL_TOKENS + 1
    gap: float = 1.0  # mean of the exponential tool times, seconds
    seed: int = 0


def parse_workload(text: str) -> Workload:
    """Read `sessions=16,turns=20,...`; what is left out keeps its default.

    Raises ValueError naming what does not fit.
    """
    pairs = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        workload = msgspec.convert(pairs, Workload, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"workload: {error}") from None
    if min(workload.sessions, workload.turns, workload.prompt, workload.new) < 1:
        raise ValueError("workload: sessions, turns, prompt and new must be at least 1")
    if workload.output <= CALL_TOKENS or workload.gap < 0 or workload.first < 0:
        raise ValueError(
            f"workload: output must exceed {CALL_TOKENS}, gap and first must not be negative"
        )
    return workload


def generate(workload: Workload) -> list[Scenario]:
    """Return one scenario per session; equal workloads give equal scenarios.

    Each turn but the last calls a scripted tool whose result is the next turn's input, after an
    exponentially distributed time (a closed loop with Poisson returns).
    """
    system = _words(random.Random(workload.seed), workload.prompt)
    return [_session(workload, system, number) for number in range(1, workload.sessions + 1)]


def _session(workload: Workload, system: str, number: int) -> Scenario:
    source = random.Random(f"{workload.seed}/{number}")
    turns = [_call_turn(workload, source, first=not index) for index in range(workload.turns - 1)]
    user = None if turns else _words(source, workload.first or workload.new)
    turns.append(ScenarioTurn(user=user, text=_words(source, workload.output)))
    return Scenario(
        format=FORMAT,
        name=f"generated-{number}",
        description=f"session {number} of a generated workload",
        system=system,
        tools=[TOOL],
        turns=turns,
    )


def _call_turn(workload: Workload, source: random.Random, first: bool) -> ScenarioTurn:
    call = Call(
        name=TOOL.name,
        arguments={"topic": _words(source, workload.output - CALL_TOKENS)},
        result=_words(source, workload.new),
    )
    gap = source.expovariate(1 / workload.gap) if workload.gap else 0.0
    user = _words(source, workload.first or workload.new) if first else None
    return ScenarioTurn(user=user, calls=[call], tool_seconds=gap)


def _words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(WORDS, k=count))
