"""gpt-oss: everything is a message with a header that names its channel and its receiver."""

import re
from collections.abc import Sequence
from typing import ClassVar

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
from agentserve.sessions.forms.window import Markers, Wait

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECEIVER = " to="
_CLOSING = Markers((*_ENDS, _START, _CHANNEL))
_HEADER_STOPS = Markers((_MESSAGE, *_ENDS))
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]*)")
_EMPTY = re.compile(r"(<\|start\|>)?(assistant)?(<\|channel\|>\w*)?\s*(<\|constrain\|>\w*)?")
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]*)")


class Harmony(Form, frozen=True):
    """Analysis is reasoning, a message to somebody a call, all else text."""

    always: ClassVar[bool] = True

    @property
    def markers(self) -> tuple[str, ...]:
        """What begins a message."""
        return (_CHANNEL, _START, _MESSAGE)

    @property
    def fresh(self) -> tuple[str, ...]:
        """A receiver: the prompt ends inside the header."""
        return (_RECEIVER,)

    @property
    def noise(self) -> tuple[str, ...]:
        """What ends a message."""
        return _ENDS

    def read(self, reading: Reading, marker: str) -> Wait[None]:
        """Read one message."""
        window = reading.window
        reading.open_start = window.position
        known = max(0, reading.plain_until - window.position)
        end, stop = yield from window.seek(known, _HEADER_STOPS, OPENING - known)
        if stop is None and not window.ended:
            # No header is so long, and none of those that begin before the last `OPENING`.
            free = window.free(end, _HEADER_STOPS)
            reading.plain_until = window.position + free
            reading.decline(marker, free - OPENING - len(marker))
            return
        header = window.text[window.at : window.at + end]
        to = next(
            (to for to in _TO.finditer(header) if _opened(reading, header[: to.start(1)])), None
        )
        channel = _IN_CHANNEL.search(header)
        if to is not None and reading.calls_on and (stop == _MESSAGE or window.ended):
            size = end + len(stop or "")
            yield from self._call(reading, to[1], size, cut=stop is None)
        elif stop != _MESSAGE:
            self._skip_header(reading, marker, end)
        elif channel is not None and channel[1] == "analysis":
            reading.open_reasoning()
            window.take(end + len(stop))
            yield from window.until(_CLOSING, reading.say)
            yield from self._end_analysis(reading)
        else:
            window.take(end + len(stop))
            yield from window.until(_CLOSING, reading.say)
            yield from window.drop(_ENDS)

    def _skip_header(self, reading: Reading, marker: str, end: int) -> None:
        """Pass over a header that no message follows; what is not one is text."""
        window = reading.window
        empty = _EMPTY.fullmatch(window.text, window.at, window.at + end)
        if marker == _RECEIVER:
            reading.decline(marker)
        else:
            window.take(end if empty else len(marker))

    def _end_analysis(self, reading: Reading) -> Wait[None]:
        """Take what is between the analysis and the rest of the next message's header."""
        window = reading.window
        if window.ended and window.at == len(window.text):
            return  # the reasoning is open
        yield from window.drop(_ENDS)
        if (yield from window.starts(0, (f"{_START}assistant",))) is not None:
            window.take(len(_START) + len("assistant"))
        reading.close_reasoning()

    def _call(self, reading: Reading, name: str, header: int, *, cut: bool) -> Wait[None]:
        window = reading.window
        reading.open_call()
        if cut or not name:
            reading.begin(None, 0)
            reading.keep(window.take(header))
            yield from reading.fail_at(name or None, window.error or INVALID, _CLOSING)
        else:
            at = yield from window.skip_space(header, OPENING)
            reading.begin(name, header)
            if (yield from window.peek(at - header)) == "{":
                reading.keep(window.take(at - header))
                yield from reading.arguments(name, _CLOSING)
            else:
                yield from reading.fail_at(name, INVALID, _CLOSING)
        yield from reading.close_call(_ENDS)

    def write(self, calls: Sequence[Call]) -> str:
        """Return messages to the functions; the last one's end is a stop token."""
        return f"{_ENDS[2]}{_START}assistant".join(
            f"{_header(name)}{dump(arguments)}" for name, arguments in calls
        )

    def constrain(self, tools: Sequence[Tool], *, one: bool) -> Constraint:
        """Return one tag a tool; the stop token that ends a call is not part of it.

        Variants have the receiver before the channel, or in another one.
        """
        tags, variants = (
            [tag(header(name), schema_content(schema), "") for name, schema in tools]
            for header in (_header, _receiver_first)
        )
        triggers = [f"{_CHANNEL}commentary to=", f"{_RECEIVER}functions."]
        return Constraint(triggers, tags, f"{_ENDS[2]}{_START}assistant", variants)


def _opened(reading: Reading, before: str) -> bool:
    """Whether the header up to the receiver's name has opened a call for the grammar, if any."""
    return not reading.triggers or before.endswith(reading.triggers)


def _receiver_first(name: str) -> str:
    return f"{_RECEIVER}functions.{name}{_CHANNEL}commentary <|constrain|>json{_MESSAGE}"


def _header(name: str) -> str:
    return f"{_CHANNEL}commentary to=functions.{name} <|constrain|>json{_MESSAGE}"
