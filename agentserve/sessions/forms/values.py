"""Values that are written without types, as JSON of the type that the tool's schema says."""

import json
from typing import Any

import msgspec

LITERALS = {"True": "true", "False": "false", "None": "null"}  # of Python, in JSON
_SCALARS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def is_text(schema: dict[str, Any], name: str) -> bool:
    """Whether the parameter is a string whatever is written, so that it can be streamed."""
    return value_types(schema, name) == {"string"} and _strings(schema, name) is None


def as_json(text: str, schema: dict[str, Any], name: str) -> str:
    """Return the JSON of the value of parameter `name` that is written as `text`.

    A string where the schema wants one, without white space around it where only certain ones are
    allowed; else what `text` is as JSON, else the string.
    """
    types = value_types(schema, name)
    bare = text.strip()
    bare = LITERALS.get(bare, bare)
    if "string" in types and not (bare == "null" and "null" in types):
        certain = _strings(schema, name) or ()
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
    found = (_types_of(part) for part in _alternatives(schema, name))
    return set[str]().union(*found)


def _strings(schema: dict[str, Any], name: str) -> set[str] | None:
    """Return the strings that the parameter can be, None where these are not certain ones."""
    strings: set[str] = set()
    for part in _alternatives(schema, name):
        if (values := _values(part)) is not None:
            strings.update(value for value in values if isinstance(value, str))
        elif "string" in _types_of(part) or not _types_of(part):
            return None
    return strings


def _alternatives(schema: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the schemas of which the parameter fits one, each once, references followed."""
    properties = schema.get("properties")
    found = [properties.get(name)] if isinstance(properties, dict) else []
    parts: list[dict[str, Any]] = []
    seen: set[str] = set()
    while found:
        part = found.pop()
        if not isinstance(part, dict):
            continue
        target = part.get("$ref")
        if isinstance(target, str):
            if target not in seen:
                seen.add(target)
                found.append(_resolve(target, schema))
        elif isinstance(part.get("type"), str | list) or _values(part) is not None:
            parts.append(part)
        else:
            options = [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)]
            found += [option for listed in options for option in listed]
            parts += [] if options else [part]
    return parts


def _types_of(part: dict[str, Any]) -> set[str]:
    kind = part.get("type")
    if isinstance(kind, str | list):
        return {kind} if isinstance(kind, str) else {item for item in kind if isinstance(item, str)}
    return {_type_of(value) for value in _values(part) or ()}


def _values(part: dict[str, Any]) -> list[Any] | None:
    if isinstance(part.get("enum"), list):
        return list(part["enum"])
    return [part["const"]] if "const" in part else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    return _SCALARS.get(type(value), "object" if isinstance(value, dict) else "array")


def _resolve(target: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in target.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found
