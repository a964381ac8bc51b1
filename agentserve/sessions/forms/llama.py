"""Llama's calls: objects with "parameters", lists of Python calls, a built-in's `name.call()`."""

from collections.abc import Iterable, Mapping, Sequence

from agentserve.sessions.forms.form import Call, Constraint, Form, Tool
from agentserve.sessions.forms.objects import Objects, opens
from agentserve.sessions.forms.python import read_arguments, read_name
from agentserve.sessions.forms.reading import INVALID, OPENING, Reading
from agentserve.sessions.forms.window import Markers, Wait

_PYTHON = "<|python_tag|>"
_CLOSING = Markers((_PYTHON,))
_LINE = Markers(("\n", _PYTHON))
_BUILT_IN = ".call"
_OBJECTS = Objects(key="parameters")


class Llama(Form, frozen=True):
    """The tag before a call is optional, except for built-in tools."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The tag before code."""
        return (_PYTHON,)

    @property
    def bare(self) -> tuple[str, ...]:
        """An object."""
        return ("{",)

    @property
    def fresh(self) -> tuple[str, ...]:
        """A list of Python calls."""
        return ("[",)

    def follows(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the rest of an object's opening."""
        return {"{": opens(names)}

    def read(self, reading: Reading, marker: str) -> Wait[None]:
        """Read a call, or a list of calls."""
        if marker == "{":
            yield from _OBJECTS.read(reading, marker)
            yield from self._separator(reading)
            return
        if not (yield from reading.opens(marker)):
            return
        window = reading.window
        if marker == _PYTHON:
            at = yield from window.skip_space(len(marker), OPENING)
            first = yield from window.peek(at)
            if first == "{" and not reading.in_reasoning:
                reading.in_call = False
                window.take(at)
                reading.blank_line = True
                return  # the object is read as one without a tag
            at += first == "["
            yield from self._python(reading, marker, at, listed=first == "[")
        else:
            yield from self._python(reading, marker, 1, listed=True)

    def _separator(self, reading: Reading) -> Wait[None]:
        """Take the semicolon between two calls."""
        if reading.stopped or not reading.fresh:
            return
        at = yield from reading.window.skip_space(0, OPENING)
        if (yield from reading.window.peek(at)) == ";":
            reading.window.take(at + 1)

    def _python(self, reading: Reading, marker: str, at: int, *, listed: bool) -> Wait[None]:
        window = reading.window
        begin = yield from window.skip_space(at, OPENING)
        end, name = yield from read_name(window, begin)
        name = name.removesuffix(_BUILT_IN) if name is not None else None
        tagged = marker == _PYTHON and not reading.in_reasoning
        if name is None and tagged:  # code for an interpreter that nobody declared
            reading.begin(None, len(marker))
            yield from reading.fail_at(None, INVALID, _CLOSING)
            reading.end_call()
            return
        if name is None or not (tagged or name in reading.tools):
            reading.decline(marker)
            return
        reading.begin(name, len(marker) if marker == _PYTHON else 0)
        reading.keep(window.take(end - (len(marker) if marker == _PYTHON else 0)))
        yield from read_arguments(reading, name, _LINE)
        reading.end_call()
        while listed and not reading.stopped and (yield from self._next(reading)):
            pass

    def _next(self, reading: Reading) -> Wait[bool]:
        """Read the next call of a list; False after the last."""
        window = reading.window
        reading.open_call()
        at = yield from window.skip_space(0, OPENING)
        char = yield from window.peek(at)
        if char == "]":
            window.take(at + 1)
        if char != ",":
            reading.in_call = False
            return False
        begin = yield from window.skip_space(at + 1, OPENING)
        end, name = yield from read_name(window, begin)
        reading.begin(name, begin)
        if name is None:
            yield from reading.fail_at(None, INVALID, _LINE)
        else:
            reading.keep(window.take(end - begin))
            yield from read_arguments(reading, name, _LINE)
        reading.end_call()
        return name is not None

    def write(self, calls: Sequence[Call]) -> str:
        """Return objects, one after the other."""
        return "; ".join(_OBJECTS.write([call]) for call in calls)

    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return one tag a tool; after the tag before code comes an object, too."""
        found = _OBJECTS.constrain(tools, one=one)
        coded = [{**found, "begin": _PYTHON + found["begin"]} for found in found.tags]
        variants = [*found.variants, *coded]
        return Constraint([*found.triggers, _PYTHON], found.tags, "; ", variants)
