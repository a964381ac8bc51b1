"""What a tool is to a model, what it gives back, and who allows its calls."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Status = Literal["ok", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """How a tool is described to the model.

    `parameters` is a JSON schema of type object. `examples` are arguments, or objects of `input`
    (what a user says) and `arguments`. A `read_only` tool changes nothing, so it may start before
    the turn that called it has ended.
    """

    name: str
    parameters: dict[str, Any]
    description: str = ""
    read_only: bool = False
    expected_ms: int | None = None
    examples: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A tool's answer: data for the model, also when the tool failed.

    `output` is text or a JSON value. A tool may return one itself to choose the status.
    """

    output: Any
    status: Status = "ok"
    duration_ms: int = 0
    truncated: bool = False

    @property
    def is_error(self) -> bool:
        """Whether the tool did not do what it was asked for."""
        return self.status != "ok"


# Asked before a call runs, with its arguments: True lets it run; False, or why not, does not.
Approve: TypeAlias = Callable[[ToolSpec, Any], bool | str | Awaitable[bool | str]]


def allow_read_only(spec: ToolSpec, arguments: Any) -> bool | str:
    """Allow the calls of tools that change nothing, and no other."""
    return spec.read_only or "only tools that change nothing are allowed"
