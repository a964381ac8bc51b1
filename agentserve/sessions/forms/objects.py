"""Calls that are JSON objects with a name and arguments, between tags or bare."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from agentserve.sessions.forms.form import Call, Constraint, Form, Tool, dump, schema_content, tag
from agentserve.sessions.forms.reading import INVALID, NO_NAME, OPENING, Reading, decode_object
from agentserve.sessions.forms.window import SPACE, SPACES, Markers, Wait, Window, begun, markers

# Before the name in a bare object, as models spell it. In free text each opens a call.
_BEGINNINGS = ("{", "{ ", "{\n", "{\n  ", "{\n    ", "{\n\t")
_KEYS = ('"arguments"', '"parameters"')
_NAME_STOPS = Markers(('"', "\\", *map(chr, range(0x20))))

_WHOLE_OPENING = re.compile(
    r'\{[ \t\r\n]*+"name"[ \t\r\n]*+:[ \t\r\n]*+"(?P<name>[^"\\\x00-\x1f]*+)"[ \t\r\n]*+,'
    r'[ \t\r\n]*+"(?:arguments|parameters)"[ \t\r\n]*+:[ \t\r\n]*+\{'
)
_KEY = "|".join(begun(*key) for key in _KEYS)
_ARGUMENTS = begun(SPACES, ",", SPACES, f"(?:{_KEY})", SPACES, ":", SPACES, r"\{")
_OBJECT = begun(SPACES, r"\{")


def opens(names: Iterable[str]) -> str:
    """Return the pattern of what follows an opening's first brace.

    It is the rest of a whole opening, or of one up to a name that is one of `names`.
    """
    known = "|".join(map(re.escape, names)) or "(?!)"
    closed = begun('"', rest=_ARGUMENTS)
    name = rf'(?:(?:{known})"|[^"\\\x00-\x1f]*+{closed})'
    return begun(SPACES, *'"name"', SPACES, ":", SPACES, '"', rest=name)


class Opening(msgspec.Struct, frozen=True):
    """How `{"name": "...", "arguments": {` goes on; `at` is the offset of the last brace."""

    state: Literal["complete", "other", "cut"]  # cut: the text ended inside, and fits so far
    name: str | None = None
    at: int = 0


class Objects(Form, frozen=True):
    """Objects between `begin` and `end`, or bare ones.

    A bare object counts on a line of its own ("line"), or where the answer begins with it and its
    name is a tool's ("start"). `key` is how the arguments are called.
    """

    begin: str = ""
    end: str = ""
    bare_at: Literal["line", "start"] = "line"
    key: str = "arguments"

    @property
    def markers(self) -> tuple[str, ...]:
        """The opening tag."""
        return (self.begin,) if self.begin else ()

    @property
    def bare(self) -> tuple[str, ...]:
        """A bare object, unless it counts at the start only."""
        return ("{",) if self.bare_at == "line" else ()

    @property
    def fresh(self) -> tuple[str, ...]:
        """A bare object."""
        return ("{",)

    def follows(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the rest of an opening after a brace, an object after the tag."""
        return {"{": opens(names), self.begin: _OBJECT}

    def read(self, reading: Reading, marker: str) -> Wait[None]:
        """Read one object."""
        tagged = marker != "{"
        if not (yield from reading.opens(marker)):
            return
        at = yield from reading.window.skip_space(len(marker) if tagged else 0, OPENING)
        opening = yield from read_opening(reading.window, at)
        first = yield from reading.window.peek(at)
        if not self._meant(reading, opening, tagged=tagged, braced=first == "{"):
            reading.decline(marker)
            return
        end = self.end if tagged else ""
        yield from read_object(reading, opening, at, markers(end or "\n"))
        yield from reading.close_call((end,) if end else ())

    def _meant(self, reading: Reading, opening: Opening, *, tagged: bool, braced: bool) -> bool:
        known = opening.name in reading.tools
        complete, cut = opening.state == "complete", opening.state == "cut"
        if reading.in_reasoning or (not tagged and self.bare_at == "start"):
            return known and (complete or cut)
        if tagged:
            return braced or cut
        named = cut and opening.name is not None
        return known or named or (complete and reading.blank_line)

    def write(self, calls: Sequence[Call]) -> str:
        """Return the objects, each on lines of its own."""
        texts = [write_object(name, arguments, self.key) for name, arguments in calls]
        if self.begin:
            texts = [f"{self.begin}\n{text}\n{self.end}" for text in texts]
        return "\n".join(texts)

    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return one tag a tool; a bare object is a variant of a tagged one."""
        bare = self._tags(tools, "{", "}")
        if self.begin:
            tags = self._tags(tools, f"{self.begin}\n{{", f"}}\n{self.end}")
            return Constraint([self.begin, *(one["begin"] for one in bare)], tags, "\n", bare)
        variants = [one for begin in _BEGINNINGS[1:] for one in self._tags(tools, begin, "}")]
        return Constraint([f'{begin}"name"' for begin in _BEGINNINGS], bare, "\n", variants)

    def _tags(self, tools: Sequence[Tool], begin: str, end: str) -> list[dict[str, Any]]:
        return [
            tag(f'{begin}"name": {dump(name)}, "{self.key}": ', schema_content(schema), end)
            for name, schema in tools
        ]


def write_object(name: str, arguments: object, key: str = "arguments", more: str = "") -> str:
    """Return a call as an object; `more` is put before the last brace."""
    return f'{{"name": {dump(name)}, "{key}": {dump(arguments)}{more}}}'


def read_opening(window: Window, at: int) -> Wait[Opening]:
    """Read a call's opening at offset `at`, taking nothing."""
    limit = at + OPENING
    whole = _WHOLE_OPENING.match(window.text, window.at + at, window.at + limit)
    if whole is not None:
        return Opening("complete", whole["name"], whole.end() - 1 - window.at)
    name: str | None = None
    for options in (("{",), ('"name"',), (":",), (), (",",), _KEYS, (":",), ("{",)):
        at = yield from window.skip_space(at, limit - at)
        if at >= limit:
            return Opening("other", name)
        if options:
            found = yield from window.starts(at, options)
            size = len(found or "")
            begun = tuple(option for option in options if not found)
        else:
            size, begun = (yield from _name_size(window, at, limit)), ('"',)
            name = window.text[window.at + at + 1 : window.at + at + size - 1] if size else None
        if not size:
            return Opening("cut" if _cut(window, at, begun) else "other", name)
        at += size
    return Opening("complete", name, at - 1)


def _name_size(window: Window, at: int, limit: int) -> Wait[int]:
    """Return the size of a string without escapes; 0 when there is none."""
    if (yield from window.starts(at, ('"',))) is None:
        return 0
    end, stop = yield from window.seek(at + 1, _NAME_STOPS, limit - at - 1)
    return end + 1 - at if stop == '"' else 0


def _cut(window: Window, at: int, options: Sequence[str]) -> bool:
    """Whether the text ended inside one of `options`, or inside the name that '"' begins."""
    rest = window.text[window.at + at :]
    if not window.ended or len(rest) > OPENING:
        return False
    if options == ('"',):
        return not rest or (rest[0] == '"' and _NAME_STOPS.search(rest, 1) is None)
    return any(option.startswith(rest) for option in options)


def read_object(
    reading: Reading,
    opening: Opening,
    skipped: int,
    recovery: Markers,
    allowed: frozenset[str] = frozenset(),
) -> Wait[None]:
    """Read an object after its opening, without what closes it, and report it.

    The first `skipped` characters are not the object's. A broken one ends before the next of
    `recovery`. `allowed` are keys that may follow the arguments.
    """
    name = opening.name if opening.state == "complete" else None
    reading.begin(name, skipped)
    window = reading.window
    if name is None:
        text, state = yield from reading.value(0, 0, delta=False)
        if state == "closed":
            _report_whole(reading, text)
    else:
        reading.keep(window.take(opening.at - skipped))
        text, state = yield from reading.value(0, 0, delta=True)
        if state == "closed":
            rest, state = yield from reading.value(1, 0, delta=False)
            if state == "closed":
                error = "" if _fits(rest, allowed) else "unexpected text after the arguments"
                reading.finish(name, text, error)
    if state == "broken":
        yield from reading.fail_at(name, INVALID, recovery)
    elif state == "ended":
        reading.fail(name or opening.name, window.error)


def _fits(rest: str, allowed: frozenset[str]) -> bool:
    """Whether what follows the arguments is a brace, after `allowed` keys."""
    rest = rest.strip(SPACE)
    if rest == "}":
        return True
    more = decode_object("{" + rest[1:]) if rest.startswith(",") else None
    return more is not None and allowed.issuperset(more)


def _report_whole(reading: Reading, text: str) -> None:
    value = decode_object(text)
    if value is None:
        reading.fail(None, INVALID)
        return
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        reading.fail(None, NO_NAME)
    elif not isinstance(arguments, dict):
        reading.fail(name, "the arguments are not a JSON object")
    else:
        reading.sink.call_done(name, arguments)
