"""Named tools: plain callables, with what the decorator says about them."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from agentserve_tools.schema import Signature
from agentserve_tools.types import ToolSpec

F = TypeVar("F", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIONS = "__agentserve_tool__"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What `@tool` says about a function beyond its signature."""

    name: str | None = None
    read_only: bool = False
    expected_ms: int | None = None
    examples: tuple[dict[str, Any], ...] = ()
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class RegisteredTool:
    """A function with its description for the model and its argument parser."""

    spec: ToolSpec
    function: Callable[..., Any]
    signature: Signature
    max_concurrency: int | None


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *,
    name: str | None = None,
    read_only: bool = False,
    expected_ms: int | None = None,
    examples: Iterable[dict[str, Any]] = (),
    max_concurrency: int | None = None,
) -> Callable[[F], F]: ...


def tool(function: F | None = None, /, **options: Any) -> F | Callable[[F], F]:
    """Mark a function as a tool; it stays the function that it was.

    name: what the model calls it (default: the function's name)
    read_only: it changes nothing, so it may start before the model's turn has ended
    expected_ms: how long it usually takes, in milliseconds
    examples: right calls to show the model: the arguments, or what a user says before the call too,
        as `{"input": "...", "arguments": {...}}`
    max_concurrency: how many calls of it may run at once (default: no limit of its own)
    """
    if "examples" in options:
        options["examples"] = tuple(options["examples"])
    described = ToolOptions(**options)

    def mark(target: F) -> F:
        setattr(target, _OPTIONS, described)
        return target

    return mark if function is None else mark(function)


def _example_arguments(example: dict[str, Any]) -> Any:
    return example["arguments"] if set(example) == {"input", "arguments"} else example


class Toolbox:
    """Tools by name, in the order in which they were added."""

    def __init__(self, tools: Iterable[Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, RegisteredTool] = {}
        for one in tools:
            self.add(one)

    def add(self, function: Callable[..., Any]) -> RegisteredTool:
        """Register a plain, decorated or async callable and return what was made of it.

        Raises TypeError for a signature that JSON arguments cannot fill, ValueError for a name
        that is taken or is not 1 to 64 letters, digits, `_` or `-`, and for an example that is
        not a valid call.
        """
        options: ToolOptions = getattr(function, _OPTIONS, ToolOptions())
        name: str = options.name or str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no tool name (1-64 letters, digits, _ or -)")
        if name in self._tools:
            raise ValueError(f"there are two tools named {name}")
        signature = Signature(function)
        for example in options.examples:
            signature.bind(_example_arguments(example))
        spec = ToolSpec(
            name=name,
            parameters=signature.schema,
            description=signature.description,
            read_only=options.read_only,
            expected_ms=options.expected_ms,
            examples=options.examples,
        )
        added = RegisteredTool(spec, function, signature, options.max_concurrency)
        self._tools[name] = added
        return added

    @property
    def specs(self) -> list[ToolSpec]:
        """How each tool is described to the model."""
        return [one.spec for one in self._tools.values()]

    def __getitem__(self, name: str) -> RegisteredTool:
        return self._tools[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)
