"""What the requests of all dialects have in common: models, tools, sampling, answer formats."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from agentserve import wire
from agentserve.errors import InvalidRequest, ModelNotFound

T = TypeVar("T", bound=msgspec.Struct)
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Fields(msgspec.Struct, frozen=True):
    """The sampling fields that are called alike everywhere; extensions of other servers too."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None


def decode(body: bytes, shape: type[T]) -> tuple[T, list[str]]:
    """Return a body as `shape`, and the names of its fields that `shape` does not have.

    Raises InvalidRequest.
    """
    asked = wire.decode(body, shape)
    names = wire.decode(body, dict[str, msgspec.Raw])
    return asked, sorted(names.keys() - set(shape.__struct_fields__))


def require_model(asked: str | None, served: str, *, strict: bool) -> str:
    """Return the name that the answer carries.

    Raises InvalidRequest without a name, and ModelNotFound when names must agree.
    """
    if not asked:
        raise InvalidRequest("the name of a model is needed; any will do", param="model")
    if strict and asked != served:
        raise ModelNotFound(f"this server serves {served!r}", param="model")
    return asked


def sampling(
    fields: Fields, stop: str | list[str] | None, logprobs: int | None = None
) -> wire.Sampling:
    """Return the sampling that a request asks for. Raises InvalidRequest.

    logprobs: as in wire.Sampling.
    """
    given = {
        name: value
        for name in Fields.__struct_fields__
        if (value := getattr(fields, name)) is not None
    }
    if fields.seed is not None:
        given["seed"] = fields.seed & (2**63 - 1)
    if fields.top_k is not None and fields.top_k < 0:
        given["top_k"] = 0
    if fields.top_p == 0:
        del given["top_p"]
        given["top_k"] = 1
    given["logprobs"] = logprobs
    stops = [stop] if isinstance(stop, str) else stop
    if stops := [one for one in stops or [] if one]:
        given["stop"] = stops
    wanted: wire.Sampling = convert(given, wire.Sampling)
    return wanted


def top_logprobs(count: int | None) -> int:
    """Return how many of the likeliest tokens are told at each place. Raises InvalidRequest."""
    if count is not None and not 0 <= count <= 20:
        raise InvalidRequest("top_logprobs is from 0 to 20", param="top_logprobs")
    return count or 0


def convert(value: Any, shape: Any) -> Any:
    """Return plain data as a native shape. Raises InvalidRequest with what does not fit."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise InvalidRequest(message, param=path.strip("`$.") or None) from None


def tool(fields: Mapping[str, Any], parameters: Any, param: str) -> wire.Tool:
    """Return a function that the model may call. Raises InvalidRequest."""
    given = {"type": "function", "name": fields.get("name")}
    given["parameters"] = parameters or NO_PARAMETERS
    given["description"] = fields.get("description") or ""
    given["strict"] = fields.get("strict") is True
    try:
        return msgspec.convert(given, wire.Tool)
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at `")[0]
        raise InvalidRequest(f"a tool cannot be used: {message}", param=param) from None


def response_format(form: Any, param: str) -> wire.ResponseFormat | None:
    """Return the constraint on the answer. Raises InvalidRequest.

    form: what `param` names, the schema beside the type.
    """
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidRequest("a format of the answer is an object with a type", param=param)
    kind, schema = form.get("type"), form.get("schema")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return wire.ResponseFormat("json_schema", {"type": "object"})
    if kind == "json_schema":
        if not isinstance(schema, dict):
            raise InvalidRequest("json_schema needs a schema", param=param)
        return wire.ResponseFormat("json_schema", schema)
    raise InvalidRequest("the type is text, json_object or json_schema", param=param)


def beside_choice(
    form: wire.ResponseFormat | None, choice: Any, warnings: list[str]
) -> wire.ResponseFormat | None:
    """Return the constraint on the answer; a turn that must call has none."""
    if form is None or choice in ("auto", "none"):
        return form
    warnings.append("answer format dropped: a call is required")
    return None


def thinking_off(effort: Any) -> dict[str, bool | int | float | str | None]:
    """Return the template options of a reasoning effort: only none at all is one."""
    return {"enable_thinking": False} if effort == "none" else {}


def template_options(value: Any) -> dict[str, bool | int | float | str | None]:
    """Return `chat_template_kwargs` as template options. Raises InvalidRequest."""
    if value is None:
        return {}
    shape = dict[str, bool | int | float | str | None]
    options: dict[str, bool | int | float | str | None] = convert(value, shape)
    return options


def limit(value: int | None, param: str) -> int | None:
    """Return how many tokens may be generated. Raises InvalidRequest."""
    if value is not None and not 1 <= value <= 10**7:
        raise InvalidRequest("the limit is from 1 to 10000000 tokens", param=param)
    return value


def named(tools: Iterable[wire.Tool], name: Any, param: str) -> wire.NamedTool:
    """Return the choice of one tool. Raises InvalidRequest when there is no such tool."""
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        raise InvalidRequest(f"no tool {str(name)[:64]!r} is declared", param=param)
    return wire.NamedTool(name)
