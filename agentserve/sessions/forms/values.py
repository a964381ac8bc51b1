"""Values that are written without types, as JSON of the type that the tool's schema says."""

import json
from typing import Any

import msgspec

LITERALS = {"True": "true", "False": "false", "None": "null"}  # of Python, in JSON
_SCALARS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_REFERENCES = 8  # that are followed one after the other


def is_text(schema: dict[str, Any], name: str) -> bool:
    """Whether the parameter is a string whatever is written, so that it can be streamed."""
    free = _strings(_property(schema, name), schema, _REFERENCES) is None
    return free and value_types(schema, name) == {"string"}


def as_json(text: str, schema: dict[str, Any], name: str) -> str:
    """Return the JSON of the value of parameter `name` that is written as `text`.

    A string where the schema wants one, without white space around it where only certain ones are
    allowed; else what `text` is as JSON, else the string.
    """
    types = value_types(schema, name)
    bare = text.strip()
    bare = LITERALS.get(bare, bare)
    if "string" in types and not (bare == "null" and "null" in types):
        certain = _strings(_property(schema, name), schema, _REFERENCES) or ()
        return quote(text.strip() if text not in certain and text.strip() in certain else text)
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError):
        return quote(text)
    return quote(text) if isinstance(value, str) else bare


def quote(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def value_types(schema: dict[str, Any], name: str) -> set[str]:
    """Return the types that the parameter's schema names; none when it does not tell."""
    return _types(_property(schema, name), schema, _REFERENCES)


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _strings(found: Any, root: dict[str, Any], depth: int) -> set[str] | None:
    """Return the strings that the schema allows, None where these are not certain ones."""
    if not isinstance(found, dict) or depth == 0:
        return None
    target = found.get("$ref")
    if isinstance(target, str):
        return _strings(_resolve(target, root), root, depth - 1)
    if isinstance(found.get("enum"), list) or "const" in found:
        values = found.get("enum", [found.get("const")])
        return {value for value in values if isinstance(value, str)}
    kind = found.get("type")
    if isinstance(kind, str | list):
        return None if "string" in kind else set()
    options = found.get("anyOf", found.get("oneOf"))
    parts = [
        _strings(option, root, depth - 1)
        for option in (options if isinstance(options, list) else ())
    ]
    return None if None in parts or not parts else set[str]().union(*filter(None, parts))


def _types(found: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(found, dict) or depth == 0:
        return set()
    target = found.get("$ref")
    if isinstance(target, str):
        return _types(_resolve(target, root), root, depth - 1)
    kind = found.get("type")
    if isinstance(kind, str | list):
        return {kind} if isinstance(kind, str) else {item for item in kind if isinstance(item, str)}
    if isinstance(found.get("enum"), list) or "const" in found:
        return {_type_of(value) for value in found.get("enum", [found.get("const")])}
    types: set[str] = set()
    for key in ("anyOf", "oneOf"):
        options = found.get(key)
        for option in options if isinstance(options, list) else ():
            types |= _types(option, root, depth - 1)
    return types


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    return _SCALARS.get(type(value), "object" if isinstance(value, dict) else "array")


def _resolve(target: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in target.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found
