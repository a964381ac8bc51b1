"""What of a client's schema the grammar enforces: the schema that xgrammar is given, and the rest.

What is left out, and what xgrammar takes no notice of, is named: the grammar then allows more than
the schema. A schema that takes too long to compile is not foreseen here; the engine refuses it.
"""

import re
import sys
from typing import Any, NamedTuple

_MAX_PATHS = 8  # that a warning names
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "unevaluatedItems",
            "unevaluatedProperties")  # fmt: skip
# What xgrammar takes no notice of.
_IGNORED = frozenset({
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "uniqueItems",
    "contains", "minContains", "maxContains", "$dynamicRef",
})  # fmt: skip
_COMBINED = ("anyOf", "oneOf", "allOf")
_NOTES = frozenset({
    "$defs", "definitions", "title", "description", "default", "examples", "$comment", "$schema",
    "$id", "$anchor", "deprecated", "readOnly", "writeOnly",
})  # fmt: skip
# These become automata that grow with the square of the properties, and faster.
_COUNTS = frozenset({"minProperties", "maxProperties"})
_COUNTED = 12  # properties at most
# What it takes no notice of where no type is given or meant.
_TYPED = frozenset({
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "required", "minItems", "maxItems", "minProperties", "maxProperties",
    "propertyNames",
})  # fmt: skip
# The numbers that it can take: as bounds, anywhere, as sizes, to count in.
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_SIZES = frozenset({"minLength", "maxLength", "minItems", "maxItems", *_COUNTS})
_BOUND, _DOUBLE, _SIZE, _STEP = 2**63 - 2, sys.float_info.max, 2**31 - 1, 1024
_OBJECT = frozenset({"properties", "patternProperties", "additionalProperties",
                     "unevaluatedProperties"})  # fmt: skip
_ARRAY = frozenset({"items", "prefixItems", "unevaluatedItems"})
# Unicode classes, back references, word boundaries, looking ahead and behind.
_UNSUPPORTED = re.compile(r"\\[pPkbB1-9]|\(\?<?[=!]")
_ATOMS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class Compilable(NamedTuple):
    """A schema for the compiler, and where it is weaker than the one that it was made from."""

    schema: Any
    unenforced: list[str]  # paths; a call that breaks one of these has schema errors
    unchecked: list[str]  # paths of patterns, which are not checked afterwards either


def compilable(schema: dict[str, Any], *, arguments: bool = False) -> Compilable:
    """Return what of a schema can be enforced.

    Objects take no properties but those that they name, unless they say so or name none.
    `arguments`: the schema is that of a tool's arguments, of which there are none if none is named.
    """
    walk = _Walk()
    made = walk.schema(schema, "")
    if arguments and not (_OBJECT | {"$ref", *_COMBINED}) & schema.keys():
        made["additionalProperties"] = False
    return Compilable(made, walk.unenforced, walk.unchecked)


def warnings(where: str, schema: dict[str, Any]) -> list[str]:
    """Return what to tell a client whose schema, found at `where`, is not enforced as a whole."""
    made = compilable(schema)
    told = []
    if made.unenforced:
        told.append(f"{where}: checked only once it is generated: {_listed(made.unenforced)}")
    if made.unchecked:
        told.append(f"{where}: neither enforced nor checked: {_listed(made.unchecked)}")
    return told


def _listed(paths: list[str]) -> str:
    shown = [path if len(path) <= 80 else path[:77] + "..." for path in paths[:_MAX_PATHS]]
    more = len(paths) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


class _Walk:
    def __init__(self) -> None:
        self.unenforced: list[str] = []
        self.unchecked: list[str] = []

    def schema(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        left_out = _without_effect(schema) | _beyond(schema)
        self.unenforced += [_join(path, key) for key in sorted(left_out - _NOTES)]
        kept = {key: value for key, value in schema.items() if key not in left_out}
        if len(schema.get("oneOf", ())) > 1 and "oneOf" in kept:
            self.unenforced.append(_join(path, "oneOf"))  # that it is no more than one of them
        made = {}
        for key, value in kept.items():
            where = _join(path, key)
            if key == "pattern" and isinstance(value, str):
                if not self._takes(value, where):
                    continue
                value = whole(value)
            if key in _SIZES and isinstance(value, float):
                value = int(value)  # 2.0 is a size in JSON schema
            made[key] = self._value(key, value, where)
        patterns = kept.get("patternProperties", {})
        if len(made.get("patternProperties", {})) < len(patterns):
            made["additionalProperties"] = True  # what the lost patterns allowed
        return _opened(made)

    def _value(self, key: str, value: Any, path: str) -> Any:
        if key in _MAPS and isinstance(value, dict):
            patterns = key == "patternProperties"
            return {
                whole(name) if patterns else name: self.schema(one, _join(path, name))
                for name, one in value.items()
                if not patterns or self._takes(name, _join(path, name))
            }
        if key in _LISTS and isinstance(value, list):
            return [self.schema(one, _join(path, str(i))) for i, one in enumerate(value)]
        if key == "propertyNames" and isinstance(value, dict):
            value = {"type": "string", **value}
        return self.schema(value, path) if key in _SCHEMAS else value

    def _takes(self, pattern: str, path: str) -> bool:
        if _UNSUPPORTED.search(pattern):
            self.unchecked.append(path)
            return False
        return True


def whole(pattern: str) -> str:
    """Return the pattern of whole strings in which `pattern` is found."""
    branches = [
        f"{'' if branch.startswith('^') else '.*'}{branch}{'' if _is_ended(branch) else '.*'}"
        for branch in _branches(pattern)
    ]
    return branches[0] if len(branches) == 1 else f"({'|'.join(branches)})"


def _branches(pattern: str) -> list[str]:
    """Split a pattern at the `|` that are in no group."""
    branches, depth = [""], 0
    for atom in _ATOMS.findall(pattern):
        depth += (atom == "(") - (atom == ")")
        if atom == "|" and depth == 0:
            branches.append("")
        else:
            branches[-1] += atom
    return branches


def _is_ended(branch: str) -> bool:
    atoms = _ATOMS.findall(branch)
    return bool(atoms) and atoms[-1] == "$"


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    """Let an object that names no properties have any, and an array any items."""
    kinds = _types(schema)
    if "object" in kinds and not _OBJECT & schema.keys():
        schema["additionalProperties"] = True
    if "array" in kinds and not _ARRAY & schema.keys():
        schema["items"] = True
    return schema


def _without_effect(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of a schema, not of those in it, that the grammar is not given."""
    found = schema.keys() & _IGNORED
    others = schema.keys() - _NOTES - _IGNORED
    if "$ref" in others:
        local = str(schema["$ref"]).startswith("#/") or schema["$ref"] == "#"
        return found | (others - {"$ref"} if local else {"$ref"})
    combined = [key for key in _COMBINED if key in others]
    if combined:
        whole_schema = not others - set(combined) and len(combined) == 1
        if not whole_schema or len(schema.get("allOf", ())) > 1:
            found |= set(combined)
    elif not (_types(schema) or (_OBJECT | _ARRAY | {"enum", "const"}) & others):
        found |= others & _TYPED
    if isinstance(schema.get("properties"), dict) and len(schema["properties"]) > _COUNTED:
        found |= others & _COUNTS
    if "pattern" in others or "format" in others:
        found |= others & {"minLength", "maxLength"}
    return found


def _beyond(schema: dict[str, Any]) -> set[str]:
    """Return the keywords with numbers that the compiler refuses, ignores or gets wrong."""
    kinds = _types(schema)
    numeric = {"integer", "number"} & set(kinds)
    limit = _BOUND if numeric else _DOUBLE
    found = {key for key in _SIZES & schema.keys() if not _within(schema[key], _SIZE)}
    for key in _BOUNDS & schema.keys():
        fits = "integer" not in kinds or _is_whole(schema[key])
        if not (fits and _within(schema[key], limit)):
            found.add(key)
    if "multipleOf" in schema and numeric:
        step, bounded = schema["multipleOf"], _BOUNDS & schema.keys() - found
        if "number" in kinds or bounded or not (_is_whole(step) and _within(step, _STEP)):
            found.add("multipleOf")
    inner = {*_MAPS, *_LISTS, *_SCHEMAS}
    return found | {key for key in schema.keys() - inner if not _within(schema[key], _DOUBLE)}


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _within(value: Any, limit: float) -> bool:
    """Whether no number in `value` is further from 0 than `limit`."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return all(_within(part, limit) for part in parts)
    return not isinstance(value, int | float) or abs(value) <= limit


def _types(schema: dict[str, Any]) -> list[Any]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
