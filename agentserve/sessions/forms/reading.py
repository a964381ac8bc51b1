"""What the readers of all forms share: the text, what is reported, and the state of the scan."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from agentserve import wire
from agentserve.sessions.brackets import Brackets
from agentserve.sessions.forms.window import Markers, Wait, Window

OPENING = 512  # characters that may pass before it is clear whether, and of what, a call opens
INVALID = "the call is not valid JSON"
NO_NAME = "the call has no name"


class Sink(Protocol):
    """What the scan reports to, in order. Positions count characters of the whole stream."""

    def text(self, text: str, position: int) -> None:
        """Take more text, which begins at `position`."""

    def reasoning(self, text: str, position: int) -> None:
        """Take more reasoning, which begins at `position`."""

    def reasoning_end(self, position: int) -> None:
        """Close the reasoning; what follows it begins at `position`."""

    def call_begin(self, name: str | None) -> None:
        """Open a call; without a name nothing is known before it closes."""

    def call_delta(self, text: str) -> None:
        """Take more of the arguments' JSON of a call that began with its name."""

    def call_done(self, name: str, arguments: dict[str, Any]) -> None:
        """Close the call as complete."""

    def call_broken(self, raw: str, name: str | None, error: str) -> None:
        """Close the call: `raw` was meant as one but cannot be read."""

    def call_end(self, position: int) -> bool:
        """Take note that the call's text ends before `position`; True ends the scan there."""
        ...


class Reading:
    """One scan.

    `fresh`: nothing but white space since the start, the reasoning or a call. `blank_line`: nothing
    but white space on this line. `open_start` is where the open call or reasoning began. Up to
    `plain_until` a reader has looked for what it needs in vain. Where a grammar is in force, only
    what one of its `triggers` opens can be a call.
    """

    def __init__(
        self,
        window: Window,
        sink: Sink,
        tools: Mapping[str, wire.Tool],
        *,
        calls_on: bool,
        triggers: Sequence[str] = (),
    ) -> None:
        self.window = window
        self.sink = sink
        self.tools = tools
        self.calls_on = calls_on
        self.triggers = tuple(triggers)
        self.in_reasoning = False
        self.in_call = False
        self.stopped = False
        self.declined = False  # what was taken for a sign is none
        self.open_start = 0
        self.plain_until = 0
        self.fresh = True
        self.blank_line = True
        self._raw: list[str] = []

    def say(self, text: str) -> None:
        """Report text that was just taken, or reasoning while that is open."""
        if not text:
            return
        line = text[text.rfind("\n") + 1 :]
        self.blank_line = (self.blank_line or "\n" in text) and not line.strip()
        self.fresh = self.fresh and not text.strip()
        position = self.window.position - len(text)
        if self.in_reasoning:
            self.sink.reasoning(text, position)
        else:
            self.sink.text(text, position)

    def open_reasoning(self) -> None:
        """Say that reasoning begins here."""
        self.in_reasoning, self.open_start = True, self.window.position

    def close_reasoning(self) -> None:
        """Say that the reasoning and its closing tag end here."""
        self.in_reasoning = False
        self.fresh = self.blank_line = True
        self.sink.reasoning_end(self.window.position)

    def open_call(self) -> None:
        """Say that a call, or what may turn out to be one, begins here."""
        self.in_call, self.open_start = True, self.window.position

    def opens(self, marker: str) -> Wait[bool]:
        """Open a call at `marker`, which comes next; False where it is text to the grammar."""
        self.open_call()
        if not self.triggers or (yield from self.window.starts(0, self.triggers)) is not None:
            return True
        self.decline(marker)
        return False

    def decline(self, marker: str, more: int = 0) -> None:
        """Say that it is none: `marker`, which comes next, is text, as are `more` characters."""
        self.in_call, self.declined = False, True
        self.say(self.window.take(len(marker) + max(0, more)))

    def begin(self, name: str | None, skipped: int) -> None:
        """Report the call's beginning; the next `skipped` characters do not belong to its text."""
        if self.in_reasoning:
            self.sink.reasoning_end(self.window.position)
        self.window.take(skipped)
        self._raw = []
        self.sink.call_begin(name)

    def keep(self, text: str) -> None:
        """Note text of the open call."""
        self._raw.append(text)

    def keep_delta(self, text: str) -> None:
        """Note text of the open call that is part of its arguments' JSON."""
        if text:
            self._raw.append(text)
            self.sink.call_delta(text)

    def finish(self, name: str | None, arguments: str, error: str = "") -> None:
        """Report the end of a call whose arguments' JSON is `arguments`."""
        value = None if error else decode_object(arguments)
        if value is None or name is None:
            self.fail(name, error or INVALID)
        else:
            self.sink.call_done(name, value)

    def fail(self, name: str | None, error: str) -> None:
        """Report the end of a call that cannot be read."""
        self.sink.call_broken("".join(self._raw).strip(), name, error)

    def fail_at(self, name: str | None, error: str, closing: Markers) -> Wait[None]:
        """Take the rest of a broken call, up to its closing marker, and report it."""
        found = yield from self.window.until(closing, self.keep)
        self.fail(name, error if found else self.window.error)

    def end_call(self) -> None:
        """Say that the call, with all that closes it, ends here."""
        self.in_call = False
        self.fresh = self.blank_line = True
        self.open_start = self.window.position
        self.stopped = self.sink.call_end(self.window.position)

    def close_call(self, closing: Sequence[str]) -> Wait[None]:
        """Take what closes a call, which may be missing, and end it."""
        if closing:
            yield from self.window.drop_space()
            yield from self.window.drop(closing)
        self.end_call()

    def value(self, depth: int, floor: int, *, delta: bool) -> Wait[tuple[str, str]]:
        """Take a JSON value up to where its nesting comes down to `floor`.

        Returns (its text, "closed" | "broken" | "ended").
        """
        brackets, parts, window = Brackets(depth), list[str](), self.window
        keep = self.keep_delta if delta else self.keep
        while True:
            end, state = brackets.advance(window.text, window.at, floor)
            text = window.take(end - window.at)
            window.visited += len(text) + 1
            keep(text)
            parts.append(text)
            if state != "open" or window.ended:
                return "".join(parts), "ended" if state == "open" else state
            yield

    def arguments(self, name: str, closing: Markers) -> Wait[bool]:
        """Take the arguments of a call that has begun; report its end. False when it is broken."""
        text, state = yield from self.value(0, 0, delta=True)
        if state == "closed":
            self.finish(name, text)
        elif state == "ended":
            self.fail(name, self.window.error)
        else:
            yield from self.fail_at(name, INVALID, closing)
        return state == "closed"


def decode_object(text: str) -> dict[str, Any] | None:
    """Return a JSON object, None where `text` is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
