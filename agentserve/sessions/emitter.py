"""Items and events from what the scanner finds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agentserve import wire
from agentserve.sessions.schemas import SchemaChecker

MOST_CALLS = 128  # of a message; a model that still goes on calls without end
Pieces = Sequence[tuple[int, str]]  # text, and where it begins in the stream
_WHITE = " \t\r\n"


class Emitter:
    """Makes items and events of what the scanner finds.

    White space beside calls and reasoning belongs to nobody; text that stands alone keeps its own.
    `logprobs` returns the log probabilities of what is shown as text, and is asked in its order.
    """

    def __init__(
        self,
        tools: Mapping[str, wire.Tool],
        mint_call: Callable[[], str],
        mint_item: Callable[[], str],
        parallel: bool,
        logprobs: Callable[[Pieces], list[wire.TokenLogprob]] = lambda pieces: [],
    ) -> None:
        self.items: list[wire.OutputItem] = []
        self.reasoning_end_at = 0
        self.end: int | None = None  # where the scan was ended after a call
        self._checker = SchemaChecker(tools)
        self._mint_call = mint_call
        self._mint_item = mint_item
        self._logprobs_of = logprobs
        self._calls_left = MOST_CALLS if parallel else 1
        self._events: list[wire.Event] = []
        self._kind = ""  # of the open item: "text", "reasoning", "call" or none
        self._id = self._call_id = ""
        self._parts: list[str] = []
        self._logprobs: list[wire.TokenLogprob] = []  # of the open item
        self._space: list[tuple[int, str]] = []  # white space that is held back
        self._trim = False  # white space that comes next belongs to nobody

    def take_events(self) -> list[wire.Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def text(self, text: str, position: int) -> None:
        """Take more text, which begins at `position`."""
        if pieces := self._visible(text, position, trim=self._trim):
            if self._kind != "text":
                self._open("text")
                self._start(wire.TextOut(self._id, ""))
            self._show(pieces)

    def reasoning(self, text: str, position: int) -> None:
        """Take more reasoning, which begins at `position`."""
        if pieces := self._visible(text, position, trim=True):
            if self._kind != "reasoning":
                self._open("reasoning")
                self._start(wire.ReasoningOut(self._id, ""))
            visible = _joined(pieces)
            self._parts.append(visible)
            self._events.append(wire.ReasoningDelta(len(self.items), visible))

    def reasoning_end(self, position: int) -> None:
        """Close the reasoning; what follows it begins at `position`.

        Reasoning that comes after something else is part of what followed the first.
        """
        self._finish_text()
        if all(isinstance(item, wire.ReasoningOut) for item in self.items):
            self.reasoning_end_at = position

    def call_begin(self, name: str | None) -> None:
        """Open a call; without a name nothing is known before it closes."""
        self._finish_text()
        if name is not None:
            self._start_call(name)

    def call_delta(self, text: str) -> None:
        """Take more of the arguments' JSON of a call that began with its name."""
        self._events.append(wire.ToolCallDelta(len(self.items), text))

    def call_done(self, name: str, arguments: dict[str, Any]) -> None:
        """Close the call as complete."""
        if self._kind != "call":
            self._start_call(name)
            self.call_delta(msgspec.json.encode(arguments).decode())
        errors = self._checker.errors(name, arguments)
        self._done(wire.ToolCallOut(self._id, self._call_id, name, arguments, errors))

    def call_broken(self, raw: str, name: str | None, error: str) -> None:
        """Close the call: `raw` was meant as one but cannot be read."""
        self._finish_text()
        if self._kind != "call":
            self._open("call")
            self._call_id = self._mint_call()
            self._start(wire.MalformedToolCallOut(self._id, self._call_id, "", error, name))
        self._done(wire.MalformedToolCallOut(self._id, self._call_id, raw, error, name))

    def call_end(self, position: int) -> bool:
        """Take note that the call's text ends before `position`; True ends the scan there."""
        self._trim = True
        self._calls_left -= 1
        if not self._calls_left:
            self.end = position
        return not self._calls_left

    def drop_open(self) -> None:
        """Forget an open call or open reasoning."""
        if self._kind in ("call", "reasoning"):
            self._kind = ""

    def close(self) -> None:
        """Finish the open item; the white space at the very end is part of the text."""
        if self._kind == "text" and self._space:
            self._show(self._space)
        self._finish_text()

    def _show(self, pieces: Pieces) -> None:
        """Add to the open text."""
        if visible := _joined(pieces):
            logprobs = self._logprobs_of(pieces)
            self._parts.append(visible)
            self._logprobs += logprobs
            self._events.append(wire.TextDelta(len(self.items), visible, logprobs))

    def _visible(self, text: str, position: int, *, trim: bool) -> Pieces:
        """Return the text without the white space at its end, which is held back."""
        visible = text.rstrip(_WHITE)
        after = (position + len(visible), text[len(visible) :])
        if not visible:
            self._space.append(after)
            return ()
        before, self._space = self._space, [after]
        if not trim or self._kind:
            return *before, (position, visible)
        trimmed = visible.lstrip(_WHITE)
        return ((position + len(visible) - len(trimmed), trimmed),)

    def _open(self, kind: str) -> None:
        self._kind = kind
        self._id = self._mint_item()
        self._parts, self._logprobs = [], []

    def _start(self, item: wire.OutputItem) -> None:
        self._events.append(wire.ItemStarted(len(self.items), item))

    def _start_call(self, name: str) -> None:
        self._open("call")
        self._call_id = self._mint_call()
        self._start(wire.ToolCallOut(self._id, self._call_id, name, {}))

    def _finish_text(self) -> None:
        """Close open text or reasoning; the white space after it belongs to nobody."""
        if self._kind == "text":
            self._done(wire.TextOut(self._id, "".join(self._parts), self._logprobs))
        elif self._kind == "reasoning":
            self._done(wire.ReasoningOut(self._id, "".join(self._parts)))
        self._space, self._trim = [], True

    def _done(self, item: wire.OutputItem) -> None:
        self._events.append(wire.ItemDone(len(self.items), item))
        self.items.append(item)
        self._kind = ""


def _joined(pieces: Pieces) -> str:
    return "".join(text for _, text in pieces)
