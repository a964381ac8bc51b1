"""Calls that are elements, a parameter each: Qwen3-Coder, GLM, MiniMax.

Values have no quotes, so a value's closing tag may also be part of it. It closes the value where
what follows is the next parameter or the end of the call.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentserve.sessions.forms.form import (
    Call,
    Constraint,
    Form,
    Tool,
    dump,
    schema_content,
    tag,
)
from agentserve.sessions.forms.reading import INVALID, OPENING, Reading
from agentserve.sessions.forms.values import as_json, is_text, quote
from agentserve.sessions.forms.window import SPACE, SPACES, Markers, Wait, begun, markers

Put = Callable[[str], None]
Schema = dict[str, Any]

_NAME_CHARACTER = r"[^\s<>\"'{}\[\]]"
_NAME = re.compile(_NAME_CHARACTER + "{1,128}")


class Elements(Form, frozen=True):
    """`outer`, `name` around the function's name, `key` and `value` around each parameter, `close`.

    Without `name[0]` the name follows `outer[0]`. `lined`: a value stands on lines
    of its own. `style` is xgrammar's name for this.
    """

    outer: tuple[str, str]
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    close: str
    style: str
    lined: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The opening tag; also the function's, which may come without."""
        return tuple(filter(None, (self.outer[0], self.name[0])))

    def follows(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the name, or what the name is in, after the opening tag."""
        name = map(re.escape, self.name[0]) if self.name[0] else (_NAME_CHARACTER,)
        return {self.outer[0]: begun(SPACES, *name)}

    def read(self, reading: Reading, marker: str) -> Wait[None]:
        """Read one call; what encloses several is left where it is."""
        if not (yield from reading.opens(marker)):
            return
        window = reading.window
        bare = marker == self.name[0]
        at = 0 if bare else (yield from window.skip_space(len(marker), OPENING))
        name, cut = None, False
        if (yield from window.starts(at, (self.name[0],))) is None:
            cut = window.ended and self.name[0].startswith(window.text[window.at + at :])
        else:
            at, name, cut = yield from self._name(reading, at + len(self.name[0]))
        known = name in reading.tools
        if name is not None and (known or not (bare or reading.in_reasoning)):
            yield from self._call(reading, name, at)
        elif cut and not (bare or reading.in_reasoning):
            reading.begin(None, len(marker))
            yield from reading.fail_at(None, window.error, self._closing())
            reading.end_call()
        else:
            reading.decline(marker)

    def _closing(self) -> Markers:
        return markers(self.close, self.outer[1])

    def _name(self, reading: Reading, at: int) -> Wait[tuple[int, str | None, bool]]:
        """Return (where the name's closing tag ends, the name if there is one, whether it is cut).

        Where no tag closes the name, it ends at white space or the next tag, and a parameter or
        the end of the call must follow.
        """
        window = reading.window
        stops = markers(self.name[1]) if self.name[1] else markers("\n", "<", " ")
        end, stop = yield from window.seek(at, stops, OPENING)
        name = window.text[window.at + at : window.at + end].strip(SPACE)
        if _NAME.fullmatch(name) is None:
            return end, None, stop is None and window.ended and not name
        if stop is None:
            return end, None, window.ended
        if self.name[1]:
            return end + len(stop), name, False
        end = yield from window.skip_space(end, OPENING)
        follows = yield from window.starts(end, (self.key[0], self.close))
        rest = window.text[window.at + end :]
        cut = window.ended and any(t.startswith(rest) for t in (self.key[0], self.close))
        return end, name if follows else None, cut

    def _call(self, reading: Reading, name: str, skipped: int) -> Wait[None]:
        window = reading.window
        reading.begin(name, 0)
        reading.keep(window.take(skipped))
        yield from self._parameters(reading, name)
        closing = tuple(filter(None, (self.outer[1], "" if self.name[0] else self.close)))
        yield from window.drop_space()
        if self.name[0] and (yield from window.starts(0, (self.name[0],))) is not None:
            reading.end_call()  # the next function in the same tag
            return
        yield from reading.close_call(closing)

    def _parameters(self, reading: Reading, name: str) -> Wait[None]:
        window = reading.window
        tool = reading.tools.get(name)
        schema = tool.parameters if tool is not None else {}
        parts: list[str] = []

        def put(text: str) -> None:
            parts.append(text)
            reading.sink.call_delta(text)

        put("{")
        while True:
            reading.keep(window.take((yield from window.skip_space(0, OPENING))))
            found = yield from window.starts(0, (self.key[0], self.close))
            if found is None:
                break
            reading.keep(window.take(len(found)))
            if found == self.close:
                put("}")
                reading.finish(name, "".join(parts))
                return
            if not (yield from self._parameter(reading, schema, put, first=len(parts) == 1)):
                break
        yield from reading.fail_at(name, INVALID, self._closing())
        yield from window.drop((self.close,))

    def _parameter(self, reading: Reading, schema: Schema, put: Put, *, first: bool) -> Wait[bool]:
        window = reading.window
        end, stop = yield from window.seek(0, markers(self.key[1]), OPENING)
        if stop is None:
            return False
        key = window.text[window.at : window.at + end].strip(SPACE)
        reading.keep(window.take(end + len(stop)))
        if self.value[0]:
            reading.keep(window.take((yield from window.skip_space(0, OPENING))))
            if (yield from window.starts(0, (self.value[0],))) is None:
                return False
            reading.keep(window.take(len(self.value[0])))
        put(("" if first else ", ") + quote(key) + ": ")
        if not is_text(schema, key):
            parts: list[str] = []
            closed = yield from self._value(reading, parts.append)
            if closed:
                put(as_json("".join(parts), schema, key))
            return closed
        put('"')
        closed = yield from self._value(reading, lambda text: put(quote(text)[1:-1]))
        if closed:
            put('"')
        return closed

    def _value(self, reading: Reading, give: Put) -> Wait[bool]:
        """Give a value's text, without the line breaks that enclose it. False when it is cut."""
        window = reading.window
        closing = markers(self.value[1], f"\n{self.value[1]}" if self.lined else "")
        after = (self.key[0], self.close, *filter(None, (self.outer[1],)))

        def both(text: str) -> None:
            reading.keep(text)
            give(text)

        if self.lined and (yield from window.starts(0, ("\n",))):
            reading.keep(window.take(1))
        while True:
            found = yield from window.until(closing, both)
            if found is None:
                return False
            end = yield from window.skip_space(len(found), OPENING)
            if (yield from window.starts(end, after)) is not None or (
                window.ended and window.at + end == len(window.text)
            ):
                reading.keep(window.take(len(found)))
                return True
            both(window.take(len(found)))

    def write(self, calls: Sequence[Call]) -> str:
        """Return the calls, each in its own tag."""
        return "\n".join(self._written(*call) for call in calls)

    def _written(self, name: str, arguments: dict[str, object]) -> str:
        line = "\n" if self.lined else ""
        between = f"{self.key[1]}\n{self.value[0]}" if self.value[0] else self.key[1]
        texts = [self._opening(name)]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else dump(value)
            texts.append(f"{self.key[0]}{key}{between}{line}{text}{line}{self.value[1]}\n")
        return "".join(texts) + self._ending()

    def _opening(self, name: str) -> str:
        line = "\n" if self.name[0] else ""
        return f"{self.outer[0]}{line}{self.name[0]}{name}{self.name[1]}\n"

    def _ending(self) -> str:
        return f"{self.close}\n{self.outer[1]}" if self.outer[1] else self.close

    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return one tag a tool; a function without the outer tag is a variant."""
        outer = f"{self.outer[0]}\n" if self.name[0] else self.outer[0]
        tags = self._tags(tools, outer, self._ending())
        if not self.name[0]:
            return Constraint([self.outer[0]], tags, "\n")
        return Constraint([*self.markers], tags, "\n", self._tags(tools, "", self.close))

    def _tags(self, tools: Sequence[Tool], outer: str, end: str) -> list[dict[str, Any]]:
        return [
            tag(
                f"{outer}{self.name[0]}{name}{self.name[1]}\n",
                schema_content(schema, self.style),
                [f"\n{end}", end],
            )
            for name, schema in tools
        ]
