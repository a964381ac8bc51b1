"""The constraint of a turn, remembered: from turn to turn a session has the same tools."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentserve import wire
from agentserve.sessions.grammar import openings, response_tag, structural_tag, triggers
from agentserve.sessions.toolformat import ToolFormat

MOST = 32
MOST_BYTES = 64 * 1024  # of tools and schema as JSON; what is larger is not remembered


class Constraint(msgspec.Struct, frozen=True):
    """`spec` is for the compiler, None where all is free; for the others see `scan.Scanner`.

    `answer_free`: an answer would be taken for a call, so that only calls are constrained.
    """

    spec: str | None = None
    triggers: Sequence[str] = ()
    openings: Sequence[str] = ()
    answer_free: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a turn may generate: calls of `tools`, or an answer of the schema `answer`, or both."""

    tools: Sequence[wire.Tool] = field(compare=False)
    choice: str | wire.NamedTool = field(compare=False)
    parallel: bool = field(compare=False)
    in_reasoning: bool = field(compare=False)
    answer: dict[str, Any] | None = field(compare=False)
    key: bytes = b""  # what all of it comes to


class Constraints:
    """Makes the constraints of one tool format."""

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._remembered = functools.lru_cache(MOST)(self._make)

    def of(
        self,
        tools: Sequence[wire.Tool],
        choice: str | wire.NamedTool,
        *,
        parallel: bool,
        in_reasoning: bool,
        answer: dict[str, Any] | None,
    ) -> Constraint:
        """Return the constraint of a turn; arguments as `grammar.structural_tag` has them."""
        everything = (tools, choice, parallel, in_reasoning, answer)
        wanted = Wanted(*everything, key=wire.encode(everything))
        return self._remembered(wanted) if len(wanted.key) <= MOST_BYTES else self._make(wanted)

    def _make(self, wanted: Wanted) -> Constraint:
        answer, format, more = wanted.answer, self._format, {"in_reasoning": wanted.in_reasoning}
        if not wanted.tools:
            return Constraint(None if answer is None else response_tag(answer, format, **more))
        begin = openings(wanted.tools, format)
        bare = any(opening.startswith("{") for opening in begin)
        free = answer is not None and bare and begins_as_a_call(answer)
        answer = None if free else answer
        spec = structural_tag(
            wanted.tools, wanted.choice, format, wanted.parallel, answer=answer, **more
        )
        if spec is None:
            return Constraint()
        known = begin if answer is not None else ()
        return Constraint(spec, triggers(wanted.tools, format), known, free)


def begins_as_a_call(schema: dict[str, Any]) -> bool:
    """Whether a value of the schema may be an object whose first key is "name"."""
    kind, properties = schema.get("type"), schema.get("properties")
    if kind is not None and "object" not in ([kind] if isinstance(kind, str) else kind):
        return False
    if not schema.keys() - {"enum", "const"}:
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
        if values:
            return any(isinstance(value, dict) and "name" in value for value in values)
    loose = any(schema.get(key) not in (None, False) for key in _LOOSE)
    return loose or kind != "object" or not properties or "name" in properties


_LOOSE = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "enum", "const"),
)
