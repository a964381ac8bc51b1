"""Mistral's calls: a list of objects, or since version 11 a name and arguments."""

import re
from collections.abc import Sequence

from agentserve.sessions.forms.form import (
    Call,
    Constraint,
    Form,
    Tool,
    dump,
    list_content,
    schema_content,
    tag,
)
from agentserve.sessions.forms.objects import read_object, read_opening, write_object
from agentserve.sessions.forms.reading import INVALID, OPENING, Reading
from agentserve.sessions.forms.window import Markers, Wait

_BEGIN = "[TOOL_CALLS]"
_CLOSING = Markers((_BEGIN,))
_HEADER_STOPS = Markers(("{", "\n", _BEGIN))
_HEADER = re.compile(
    r"\s*(?P<name>[\w.\-]{1,128})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?", re.ASCII
)
_MORE = frozenset({"id", "type"})


class Mistral(Form, frozen=True):
    """Both forms are read; `listed` says which one is written."""

    listed: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The token before calls."""
        return (_BEGIN,)

    def read(self, reading: Reading, marker: str) -> Wait[None]:
        """Read one call with its name first, or a list of calls."""
        if not (yield from reading.opens(marker)):
            return
        window = reading.window
        at = yield from window.skip_space(len(marker), OPENING)
        first = yield from window.peek(at)
        if first in ("[", "{") and not reading.in_reasoning:
            window.take(at)
            yield from _read_list(reading)
            return
        at, stop = yield from window.seek(at, _HEADER_STOPS, OPENING)
        found = _HEADER.fullmatch(window.text, window.at + len(marker), window.at + at)
        name = found["name"] if found else None
        if name is None or (reading.in_reasoning and name not in reading.tools):
            reading.decline(marker)
        elif stop == "{":
            reading.begin(name, 0)
            reading.keep(window.take(at))
            yield from reading.arguments(name, _CLOSING)
            reading.end_call()
        elif window.ended:
            reading.begin(None, len(marker))
            yield from reading.fail_at(name, window.error, _CLOSING)
            reading.end_call()
        else:
            reading.decline(marker)

    def write(self, calls: Sequence[Call]) -> str:
        """Return the calls as the model writes them."""
        if self.listed:
            objects = ", ".join(write_object(name, arguments) for name, arguments in calls)
            return f"{_BEGIN}[{objects}]"
        return "".join(f"{_BEGIN}{name}[ARGS]{dump(arguments)}" for name, arguments in calls)

    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return one tag a tool, or a tag of a list."""
        if not self.listed:
            named = [
                tag(f"{_BEGIN}{name}[ARGS]", schema_content(schema), "") for name, schema in tools
            ]
            return Constraint([_BEGIN], named, "")
        objects = [
            tag(f'{{"name": {dump(name)}, "arguments": ', schema_content(schema), "}")
            for name, schema in tools
        ]
        calls = list_content(objects, ", ", one=one)
        return Constraint([_BEGIN], [tag(f"{_BEGIN}[", calls, "]")], "")


def _read_list(reading: Reading) -> Wait[None]:
    """Read `[{...}, {...}]`, or a single object."""
    window = reading.window
    listed = (yield from window.peek(0)) == "["
    window.take(int(listed))
    while not reading.stopped:
        yield from window.drop_space()
        yield from window.drop((",",))
        yield from window.drop_space()
        first = yield from window.peek(0)
        if first == "{":
            reading.open_call()
            opening = yield from read_opening(window, 0)
            yield from read_object(reading, opening, 0, _CLOSING, _MORE)
            reading.end_call()
        elif listed and first not in ("]", ""):
            reading.open_call()
            reading.begin(None, 0)
            yield from reading.fail_at(None, INVALID, _CLOSING)
            reading.end_call()
            return
        if not listed or first != "{":
            break
    if listed and not reading.stopped:
        yield from window.drop(("]",))
    reading.in_call = False
