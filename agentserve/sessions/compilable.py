"""What of a client's schemas the grammar compiler is given: the engine compiles between two steps.

Patterns, formats and counts of properties become automata, and the time that xgrammar takes for
them grows faster than their size: sixty optional letters in a row keep it busy for minutes. So all
schemas of a turn share an allowance. A keyword that does not fit what is left of it, or that
xgrammar cannot compile, is left out: the grammar then allows more than the schema.
"""

import re
from typing import Any

_ALLOWANCE = 400  # states, roughly
_FORMAT_STATES = 10
_OPTIONAL = 20  # a state that may be skipped, in states that may not
# Unicode classes and back references.
_UNSUPPORTED = re.compile(r"\\[pPk1-9]")
_ATOMS = re.compile(r"\{(\d+)(?:,(\d*))?\}|\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class Allowance:
    """What may still be compiled for one turn."""

    def __init__(self, states: int = _ALLOWANCE) -> None:
        self._left = states

    def compilable(self, schema: Any) -> Any:
        """Return the schema without the keywords that cannot be compiled in time."""
        if isinstance(schema, list):
            return [self.compilable(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        return {
            key: self._patterns(value) if key == "patternProperties" else self.compilable(value)
            for key, value in schema.items()
            if self._takes(_states(key, value, schema))
        }

    def _patterns(self, properties: Any) -> Any:
        if not isinstance(properties, dict):
            return properties
        return {
            pattern: self.compilable(value)
            for pattern, value in properties.items()
            if self._takes(pattern_states(pattern))
        }

    def _takes(self, states: float) -> bool:
        taken = states <= self._left
        if taken:
            self._left -= int(states)
        return taken


def pattern_states(pattern: str) -> float:
    """Return about how many states the pattern has, its repetitions written out.

    Infinite where xgrammar cannot compile it.
    """
    if _UNSUPPORTED.search(pattern):
        return float("inf")
    totals, last = [0.0], 0.0
    for match in _ATOMS.finditer(pattern):
        atom = match[0]
        if match[1] or atom == "?":
            times = _repetitions(match)
            totals[-1] += last * (times - 1)
            last *= times
        elif atom == "(":
            totals.append(0.0)
        elif atom == ")" and len(totals) > 1:
            last = totals.pop() + 1
            totals[-1] += last
        else:
            last = 1.0
            totals[-1] += last
    return sum(totals)


def _repetitions(quantifier: re.Match[str]) -> float:
    least, most = quantifier[1], quantifier[2]
    if least is None or int(least) == 0:
        return _OPTIONAL * float(most or 1)
    return float(most or least)


def _states(key: str, value: Any, schema: dict[str, Any]) -> float:
    if key == "pattern" and isinstance(value, str):
        return pattern_states(value)
    if key == "format" and isinstance(value, str):
        return _FORMAT_STATES
    if key in ("minProperties", "maxProperties"):
        properties = schema.get("properties")
        return len(properties) ** 2 / 20 if isinstance(properties, dict) else 0
    return 0
