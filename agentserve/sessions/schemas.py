"""JSON schemas of tools: refused when they cannot be used, and checked against calls."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import jsonschema
import msgspec

from agentserve import wire
from agentserve.errors import BadToolSchema
from agentserve.sessions import compilable

_MAX_BYTES = 64 * 1024
_MAX_DEPTH = 32
_MAX_PARTS = 2000  # objects and arrays: about a millisecond each, here and in the grammar
_MAX_STEPS = 50_000  # of one check: about a second
_MAX_ERRORS = 8
_MAX_ERROR_LENGTH = 300
_Meta = jsonschema.Draft202012Validator
# Patterns are ECMA-262, which Python's `re` cannot judge; the grammar compiler does.
_NO_FORMATS = jsonschema.FormatChecker(formats=())


class _TooManySteps(Exception):
    """A check that a client's schema makes too long."""


_steps: ContextVar[int] = ContextVar("steps of the check that runs")


def _no_check(*_: Any) -> None:
    """Leave a keyword to the grammar."""


def _no_pattern(check: Callable[..., Any]) -> Callable[..., Any]:
    """Leave `additionalProperties` to the grammar where patterns say which those are."""

    def unless_pattern(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        pattern = "patternProperties" in schema
        return None if pattern else check(validator, value, instance, schema)

    return unless_pattern


def _counted(keyword: str, check: Callable[..., Any]) -> Callable[..., Any]:
    """Count what a keyword costs: references can double it at each of their levels."""

    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _steps.set(_steps.get() + _cost(keyword, value, instance))
        if _steps.get() > _MAX_STEPS:
            raise _TooManySteps
        return check(validator, value, instance, schema)

    return counted


def _cost(keyword: str, value: Any, instance: Any) -> int:
    if keyword == "uniqueItems" and isinstance(instance, list):
        return len(instance) ** 2
    return 1 + len(value) if isinstance(value, dict | list) else 1


# A client's pattern could keep Python's backtracking matcher busy for hours.
_CHECKS = {
    **_Meta.VALIDATORS,
    "pattern": _no_check,
    "patternProperties": _no_check,
    "unevaluatedProperties": _no_check,
    "additionalProperties": _no_pattern(_Meta.VALIDATORS["additionalProperties"]),
}
_Validator = jsonschema.validators.extend(
    _Meta, {keyword: _counted(keyword, check) for keyword, check in _CHECKS.items()}
)


def validate_schema(tool: wire.Tool) -> None:
    """Raise BadToolSchema unless `tool.parameters` is a schema of an object, of bounded size.

    A strict tool's schema must be one that the grammar enforces as a whole.
    """
    where = f"tools.{tool.name}.parameters"
    if tool.parameters.get("type", "object") != "object":
        raise BadToolSchema("the parameters of a tool are an object", param=where)
    check_schema(tool.parameters, where)
    if tool.strict and (lost := compilable.warnings(where, tool.parameters)):
        raise BadToolSchema(f"strict, but not all of it can be enforced: {lost[0]}", param=where)


def check_schema(schema: dict[str, Any], where: str) -> None:
    """Raise BadToolSchema unless `schema` is a schema, of bounded size; `where` names it."""
    depth, parts = _size(schema)
    if depth > _MAX_DEPTH:
        raise BadToolSchema(f"the schema is nested deeper than {_MAX_DEPTH} levels", param=where)
    if parts > _MAX_PARTS:
        raise BadToolSchema(f"the schema has more than {_MAX_PARTS} parts", param=where)
    if len(msgspec.json.encode(schema)) > _MAX_BYTES:
        raise BadToolSchema(f"the schema is larger than {_MAX_BYTES} bytes", param=where)
    if remote := _remote_reference(schema):
        raise BadToolSchema(f"{remote!r}: only references inside the schema work", param=where)
    try:
        _Meta.check_schema(schema, format_checker=_NO_FORMATS)
    except jsonschema.SchemaError as error:
        path = ".".join(map(str, error.absolute_path))
        raise BadToolSchema(
            _short(f"{path}: {error.message}" if path else error.message), param=where
        ) from None


class SchemaChecker:
    """Checks arguments against the schemas of `tools`."""

    def __init__(self, tools: Mapping[str, wire.Tool]) -> None:
        self._tools = tools
        self._validators: dict[str, Any] = {}  # by tool, made when first needed

    def errors(self, name: str, arguments: dict[str, Any]) -> list[str]:
        """Return what is wrong with the arguments, readable for a model; empty when nothing is."""
        tool = self._tools.get(name)
        if tool is None:
            return [_short(f"there is no tool {name!r}")]
        _steps.set(0)
        try:
            if name not in self._validators:
                self._validators[name] = _Validator(tool.parameters)
            found = self._validators[name].iter_errors(arguments)
            return [_describe(error) for error, _ in zip(found, range(_MAX_ERRORS), strict=False)]
        except _TooManySteps:
            return ["the arguments take too long to check against the schema of the tool"]
        except Exception:  # a library on a client's schema: references, URLs, numbers, recursion
            return ["the schema of the tool cannot be applied to these arguments"]


def _describe(error: Any) -> str:
    path = ".".join(map(str, error.absolute_path))
    return _short(f"{path}: {error.message}" if path else error.message)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_LENGTH else text[: _MAX_ERROR_LENGTH - 3] + "..."


def _size(value: Any) -> tuple[int, int]:
    """Return the nesting depth and the count of objects and arrays, without recursion."""
    depth, parts, level = 0, 0, [value]
    while level:
        depth += 1
        parts += len(level)
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item
        level = [item for item in inner if isinstance(item, dict | list)]
    return depth, parts


def _remote_reference(value: Any) -> str | None:
    """Return a reference that leaves the schema, if there is one."""
    if isinstance(value, list):
        return next(filter(None, map(_remote_reference, value)), None)
    if not isinstance(value, dict):
        return None
    for key in ("$ref", "$dynamicRef"):
        target = value.get(key)
        if isinstance(target, str) and not target.startswith("#"):
            return target
    return next(filter(None, map(_remote_reference, value.values())), None)
