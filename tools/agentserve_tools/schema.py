"""A typed Python function as a JSON schema, and JSON arguments as that function's arguments.

Both come from one msgspec Struct made from the signature, so that whatever the schema allows can be
called and whatever it refuses is refused before the call.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, Union

import docstring_parser
import msgspec
from msgspec import UNSET, UnsetType

_UNSUPPORTED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{}: a model gives arguments by name; take a list instead",
    inspect.Parameter.VAR_KEYWORD: "**{}: name each parameter, or take a dict",
    inspect.Parameter.POSITIONAL_ONLY: "positional-only {}: a model gives arguments by name",
}


class ArgumentError(ValueError):
    """The arguments do not fit the function's signature; the text is meant for the model."""


class Signature:
    """The parameters of one function, seen as JSON."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the signature, the annotations and the docstring of `function`.

        Raises TypeError when a parameter has no annotation, or a kind or a type that JSON
        arguments cannot fill.
        """
        label = getattr(function, "__name__", type(function).__name__)
        document = docstring_parser.parse(inspect.getdoc(function) or "")
        self.description = _summary(document)
        parameters = _parameters(function, label)
        self._shape = _shape(parameters, label)
        self.schema = _schema(self._shape, parameters, document, label)

    def bind(self, arguments: Any) -> dict[str, Any]:
        """Return keyword arguments of the annotated Python types.

        Arguments left out are left out here too: the function's own defaults apply. Raises
        ArgumentError that names the argument which does not fit.
        """
        try:
            bound = msgspec.convert(arguments, self._shape)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            where = path.rstrip("`").lstrip(".")
            raise ArgumentError(f"argument {where}: {message}" if where else message) from None
        values = {name: getattr(bound, name) for name in self._shape.__struct_fields__}
        return {name: value for name, value in values.items() if value is not UNSET}


class JsonArguments:
    """Arguments that a tool takes as one JSON object, because it checks them itself."""

    def bind(self, arguments: Any) -> dict[str, Any]:
        """Return the one keyword argument `arguments`. Raises ArgumentError for another type."""
        if not isinstance(arguments, dict):
            raise ArgumentError(f"expected an object, got {type(arguments).__name__}")
        return {"arguments": arguments}


def underlying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _summary(document: docstring_parser.Docstring) -> str:
    parts = (document.short_description, document.long_description)
    return "\n\n".join(part for part in parts if part)


def _parameters(function: Callable[..., Any], label: str) -> dict[str, inspect.Parameter]:
    """Return the parameters with their annotations resolved."""
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(underlying(function), include_extras=True)
    for name, parameter in parameters.items():
        if refusal := _UNSUPPORTED.get(parameter.kind):
            raise TypeError(f"tool {label} has {refusal.format(name)}")
        if name not in hints:
            raise TypeError(f"tool {label}: parameter {name} needs a type annotation")
    return {name: one.replace(annotation=hints[name]) for name, one in parameters.items()}


def _shape(parameters: dict[str, inspect.Parameter], label: str) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty:
            fields.append((name, parameter.annotation))
        else:
            fields.append((name, Union[parameter.annotation, UnsetType], UNSET))  # noqa: UP007
    return msgspec.defstruct(label, fields, forbid_unknown_fields=True, kw_only=True)


def _schema(
    shape: type[msgspec.Struct],
    parameters: dict[str, inspect.Parameter],
    document: docstring_parser.Docstring,
    label: str,
) -> dict[str, Any]:
    try:
        (top,), components = msgspec.json.schema_components([shape], ref_template="#/$defs/{name}")
    except TypeError as error:
        reason = str(error).splitlines()[-1]
        raise TypeError(f"tool {label}: {reason[0].lower()}{reason[1:]}") from None
    schema: dict[str, Any] = components.pop(top["$ref"].rpartition("/")[2])
    del schema["title"]
    for described in document.params:
        if described.arg_name in schema["properties"] and described.description:
            schema["properties"][described.arg_name].setdefault(
                "description", " ".join(described.description.split())
            )
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty and parameter.default is not None:
            schema["properties"][name]["default"] = _json_default(parameter.default, name, label)
    if components:
        schema["$defs"] = components
    return schema


def _json_default(value: Any, name: str, label: str) -> Any:
    try:
        return msgspec.to_builtins(value)
    except TypeError:
        raise TypeError(f"tool {label}: the default of {name} is not a JSON value") from None
