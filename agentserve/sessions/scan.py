"""One scanner for everything that a model says: reasoning, text, and tool calls.

It takes text in pieces of any size and gives the same result for all of them, in linear time: it
never looks back further than a call's opening, and it skips through text and strings to the next
character that matters. What a call looks like is its form's business (`forms`).
"""

from collections.abc import Mapping, Sequence

from agentserve import wire
from agentserve.sessions.forms.reading import Reading, Sink
from agentserve.sessions.forms.window import Markers, Wait, Window
from agentserve.sessions.toolformat import ToolFormat

__all__ = ["Scanner", "Sink"]

MOST_SIGNS = 16_384  # of calls and reasoning in a message; what follows so many of them is text


class Scanner:
    """Scans one message. `tools` are the declared ones; without `tools_on` calls are text.

    `triggers` are what opens calls for the grammar of the turn, if it has one. With `openings`, a
    message is calls if it begins with one of them after the reasoning; otherwise all of it is text.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each thing that changes what is read
        self,
        format: ToolFormat,
        tools: Mapping[str, wire.Tool],
        sink: Sink,
        *,
        tools_on: bool = True,
        in_reasoning: bool = False,
        triggers: Sequence[str] = (),
        openings: Sequence[str] = (),
    ) -> None:
        self._form = format.form
        self._window = Window()
        self._reading = Reading(self._window, sink, tools, calls_on=tools_on, triggers=triggers)
        self._think, self._unthink = format.reasoning or ("", "")
        self._opened = in_reasoning and bool(self._think)
        self._thought = format.thought[:1] if format.thought else ()
        self._openings = tuple(openings)
        form = format.form
        on = tools_on or form.always
        markers = (*form.markers, *form.noise) if on else ()
        bare = form.bare if on else ()
        fresh = (*bare, *(form.fresh if on else ()))
        self._fresh_only = {*fresh} - {*bare}
        follows = form.follows(tools)
        self._in_text = Markers((*markers, *bare), follows)
        self._in_fresh = Markers((*markers, *fresh), follows)
        self._in_thought = Markers((self._unthink, *markers), follows)
        self.stalled = False  # whether a form's reader took nothing, which none should
        self._run = self._message()
        self._resume()

    @property
    def in_reasoning(self) -> bool:
        """Whether reasoning is open."""
        return self._reading.in_reasoning

    @property
    def in_call(self) -> bool:
        """Whether a call is open, or what may become one."""
        return self._reading.in_call

    @property
    def open_start(self) -> int:
        """Where the open call or reasoning began."""
        return self._reading.open_start

    @property
    def visited(self) -> int:
        """How many characters were looked at, some of them more than once."""
        return self._window.visited

    def push(self, text: str) -> None:
        """Scan more text."""
        self._window.push(text)
        self._resume()

    def finish(self, error: str) -> None:
        """Report what is held back; an open call is broken, for the reason `error`."""
        self._window.end(error)
        self._resume()

    def _resume(self) -> None:
        next(self._run, None)

    def _message(self) -> Wait[None]:
        reading, window = self._reading, self._window
        yield from self._lead()
        signs = 0
        while not reading.stopped and signs < MOST_SIGNS:
            reading.declined = False
            if self._openings and not reading.in_reasoning and (yield from self._answers()):
                break
            marker = yield from window.until(self._markers(), reading.say)
            if marker is None:
                return
            if reading.in_reasoning and marker == self._unthink:
                window.take(len(marker))
                reading.close_reasoning()
            elif marker in self._form.noise:
                window.take(len(marker))
            elif marker in self._fresh_only and not reading.fresh:
                reading.say(window.take(len(marker)))
            else:
                before = window.position
                yield from self._form.read(reading, marker)
                if window.position == before:  # a reader's fault must not hang the server
                    self.stalled = True
                    reading.decline(marker)
            # One that is declined may not have been seen, had all the text been there at once.
            signs += not reading.declined
        if not reading.stopped:
            yield from window.until(_NOTHING, reading.say)

    def _answers(self) -> Wait[bool]:
        """Whether what comes next is the answer, neither a call nor reasoning."""
        at = yield from self._window.skip_space(0, _LEAD)
        found = yield from self._window.starts(at, (*self._openings, *self._thought))
        if found in self._openings:
            self._openings = ()
        return found is None

    def _markers(self) -> Markers:
        if self._reading.in_reasoning:
            return self._in_thought
        return self._in_fresh if self._reading.fresh else self._in_text

    def _lead(self) -> Wait[None]:
        """Find out whether the message begins with reasoning."""
        if self._think and not self._opened:
            at = yield from self._window.skip_space(0, _LEAD)
            if (yield from self._window.starts(at, (self._think,))) is not None:
                self._window.take(at + len(self._think))
                self._opened = True
        if self._opened:
            self._reading.open_reasoning()
            self._reading.open_start = 0


_LEAD = 512  # characters of white space before reasoning, calls or an answer
_NOTHING = Markers(())
