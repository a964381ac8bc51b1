"""Calls that are a name and a JSON object, all of them between tags: DeepSeek, Kimi."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

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
from agentserve.sessions.forms.reading import NO_NAME, OPENING, Reading
from agentserve.sessions.forms.window import Markers, Wait

_FENCE = "```"


class Named(Form, frozen=True):
    """`begin`, a header with the name, the arguments, `end`; `around` encloses all calls.

    `header` is a pattern (with the group "name") of what stands between `begin` and the arguments;
    `written` is that as a format string of name and number of the call, and `between` what is
    written between calls. `fenced`: a code fence encloses the arguments.
    """

    begin: str
    end: str
    header: str
    written: str
    around: tuple[str, str]
    between: str = ""
    fenced: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The opening tag."""
        return (self.begin,)

    @property
    def noise(self) -> tuple[str, ...]:
        """What encloses all calls."""
        return self.around

    def read(self, reading: Reading, marker: str) -> Wait[None]:
        """Read one call."""
        if not (yield from reading.opens(marker)):
            return
        window = reading.window
        stops, closing = _stops(self.begin, self.end, *self.around)
        at, stop = yield from window.seek(len(marker), stops, OPENING)
        found = _pattern(self.header).fullmatch(
            window.text, window.at + len(marker), window.at + at
        )
        name = found["name"] if found else None
        if reading.in_reasoning and name not in reading.tools:
            reading.decline(marker)
            return
        if stop == "{" and name is not None:
            reading.begin(name, 0)
            reading.keep(window.take(at))
            if (yield from reading.arguments(name, closing)) and self.fenced:
                yield from window.drop_space()
                yield from window.drop((_FENCE,))
        else:
            reading.begin(None, len(marker))
            yield from reading.fail_at(None, NO_NAME, closing)
        yield from reading.close_call((self.end,))

    def write(self, calls: Sequence[Call]) -> str:
        """Return the calls as the model writes them."""
        fence = f"\n{_FENCE}" if self.fenced else ""
        texts = [
            f"{self.begin}{self.written.format(name, i)}{dump(arguments)}{fence}{self.end}"
            for i, (name, arguments) in enumerate(calls)
        ]
        return self.between.join(texts).join(self.around)

    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return the calls, enclosed, as one tag; calls without what encloses them are variants."""
        tags = [self._tag(name, schema_content(schema)) for name, schema in tools]
        calls = list_content(tags, self.between, one=one)
        enclosed = [tag(self.around[0], calls, self.around[1])]
        return Constraint([self.around[0], self.begin], enclosed, "", tags)

    def _tag(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        begin, number, rest = self.written.partition("{1}")
        if number:
            parts = (
                {"type": "regex", "pattern": "[0-9]{1,9}"},
                {"type": "const_string", "value": rest},
            )
            arguments = {"type": "sequence", "elements": [*parts, arguments]}
        end = f"\n{_FENCE}{self.end}" if self.fenced else self.end
        return tag(self.begin + begin.format(name), arguments, end)


@cache
def _stops(*tags: str) -> tuple[Markers, Markers]:
    """Return what ends a call's header, and a broken call."""
    return Markers(("{", *tags)), Markers(tags)


@cache
def _pattern(header: str) -> re.Pattern[str]:
    return re.compile(header)
