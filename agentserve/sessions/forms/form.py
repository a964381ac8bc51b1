"""What a form of tool calls can do: be found, read, written and constrained."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from agentserve.sessions.forms.reading import Reading
from agentserve.sessions.forms.window import Wait

Call = tuple[str, dict[str, Any]]  # name, arguments
Tool = tuple[str, dict[str, Any]]  # name, JSON schema of the arguments


class Constraint(msgspec.Struct, frozen=True):
    """The structural tags (xgrammar's JSON) of calls.

    In free text one of `triggers` opens a tag, which may be one of `variants`: calls in spellings
    that are read, too. Where nothing but calls may come, `separator` stands between `tags`.
    """

    triggers: list[str]
    tags: list[dict[str, Any]]
    separator: str
    variants: list[dict[str, Any]] = []


class Form(msgspec.Struct, frozen=True):
    """One way to write calls."""

    # Where calls are not allowed, this form is read all the same: all text has it.
    always: ClassVar[bool] = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings at which a call may begin anywhere, also inside reasoning."""
        return ()

    @property
    def bare(self) -> tuple[str, ...]:
        """Strings at which a call may begin in text, where no marker announces it."""
        return ()

    @property
    def fresh(self) -> tuple[str, ...]:
        """Strings at which a call may begin only where no text came before it."""
        return ()

    @property
    def noise(self) -> tuple[str, ...]:
        """Strings around calls that mean nothing."""
        return ()

    def follows(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return patterns of what comes after strings at which calls begin; any other is text.

        `names` are the tools'. The patterns spare the reader what is clearly none,
        and match also where the text is cut off.
        """
        return {}

    @abstractmethod
    def read(self, reading: Reading, marker: str) -> Wait[None]:
        """Read what begins with `marker`, which comes next: take at least that."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Return what the model would generate for `calls`."""

    @abstractmethod
    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return the structural tags of calls to `tools`, at most one call with `one`."""


def dump(value: Any) -> str:
    """Return JSON as chat templates print it."""
    return json.dumps(value, ensure_ascii=False)


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    """Return the structural tag of `content` between `begin` and `end`, or one of several."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema_content(schema: dict[str, Any], style: str = "json") -> dict[str, Any]:
    """Return the structural tag's content of arguments; small models can fill up on white space."""
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}
    return content if style == "json" else {**content, "style": style}


def list_content(tags: list[dict[str, Any]], separator: str, *, one: bool) -> dict[str, Any]:
    """Return the structural tag of calls, one after the other."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": one,
    }
