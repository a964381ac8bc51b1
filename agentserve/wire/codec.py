"""JSON is parsed here, once, and nowhere else."""

from typing import Any, TypeVar

import msgspec

from agentserve.errors import InvalidRequest
from agentserve.wire.requests import HistoryRequest

T = TypeVar("T")


def decode(body: bytes, shape: type[T]) -> T:
    """Parse a JSON request body as `shape`.

    Raises InvalidRequest with the JSON path (as `param`) of what does not fit.
    """
    try:
        if shape is HistoryRequest:
            return msgspec.convert(_tag_refs(msgspec.json.decode(body)), shape)
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the body is not valid JSON") from None


def decode_query(pairs: list[tuple[str, str]], shape: type[T]) -> T:
    """Parse the parameters of a query string as `shape`.

    Raises InvalidRequest with the parameter that does not fit or is given twice.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        raise InvalidRequest("a query parameter is given twice")
    try:
        return msgspec.convert(values, shape, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    message, _, path = str(error).partition(" - at `")
    return InvalidRequest(message, param=path.rstrip("`") or None)


def _tag_refs(body: Any) -> Any:
    """Give `{ref: ...}` items, which carry no type on the wire, their tag."""
    if isinstance(body, dict) and isinstance(body.get("items"), list):
        for item in body["items"]:
            if isinstance(item, dict) and set(item) == {"ref"}:
                item["type"] = "ref"
    return body


def encode(value: Any) -> bytes:
    """Return the JSON of a response."""
    return msgspec.json.encode(value)
