"""What a person sees of a running agent, and is asked: events as text, questions, lines."""

import asyncio
import json
import sys
import threading
from typing import Any, TextIO

from agentserve_tools import ToolOutput, ToolSpec

from agentserve import wire
from agentserve.client.loop import RunEvent
from agentserve.client.models import ToolDone, ToolStarted

_SHOWN = 200  # characters of a call's name, arguments or error
# A model's or tool's output must not move the cursor or rename the window.
_UNPRINTABLE = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)]) | {9: 9, 10: 10}


def printable(text: str) -> str:
    """Return the text without control characters other than tab and newline."""
    return text.translate(_UNPRINTABLE)


class Lines:
    """Lines of standard input, read in a thread so that the event loop goes on."""

    def __init__(self) -> None:
        self._reading: asyncio.Future[str | None] | None = None
        self._terminal = sys.stdin is not None and sys.stdin.isatty()
        self._prompt = ""

    async def next(self, prompt: str) -> str | None:
        """Return the next line, None at the end. Cancelled, the line goes to who asks next."""
        self._prompt = prompt
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_future()
            arguments = (asyncio.get_running_loop(), self._reading, prompt)
            threading.Thread(target=self._read, args=arguments, daemon=True).start()
        else:
            self.prompt_again()
        line = await asyncio.shield(self._reading)
        self._reading = None
        return line

    def prompt_again(self) -> None:
        """Show the prompt once more, after something else was written."""
        if self._terminal:
            sys.stdout.write(self._prompt)
            sys.stdout.flush()

    def _read(
        self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[str | None]", prompt: str
    ) -> None:
        line = self._line(prompt)
        if not loop.is_closed():
            loop.call_soon_threadsafe(future.set_result, line)

    def _line(self, prompt: str) -> str | None:
        """Wait for a line; None at the end, or where there is no input."""
        if self._terminal and sys.stdout.isatty():
            try:
                return input(prompt)
            except (EOFError, UnicodeDecodeError):
                return None
        if sys.stdin is None:
            return None
        if self._terminal:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        # Not sys.stdin: a thread that waits there holds its lock, and Python then aborts at exit.
        with open(0, "rb", buffering=0, closefd=False) as file:
            line = file.readline()
        return line.decode(errors="replace").rstrip("\r\n") if line else None


class Questions:
    """Asks before each call of a tool that may change something."""

    def __init__(self, lines: Lines, notes: TextIO) -> None:
        self._lines = lines
        self._notes = notes
        self._always: set[str] = set()
        self._one_at_a_time = asyncio.Lock()

    async def approve(self, spec: ToolSpec, arguments: Any) -> bool | str:
        """Return whether the call may run, or why not; no answer is no."""
        async with self._one_at_a_time:
            if spec.read_only or spec.name in self._always:
                return True
            self._notes.write(f"\nAllow {spec.name} {_json(arguments, limit=None)}\n")
            self._notes.flush()
            answer = await self._lines.next("[y]es, [n]o, [a]lways this tool: ")
        if answer is None:
            return "nobody is there to ask (the input has ended); --approve auto allows every call"
        first = answer.strip().lower()[:1]
        if first == "a":
            self._always.add(spec.name)
        return first in ("y", "a") or "the user said no"


class Screen:
    """Writes the model's text to `text` as it comes, and what happens beside it to `notes`."""

    def __init__(self, text: TextIO, notes: TextIO, statistics: bool) -> None:
        self._text = text
        self._notes = notes
        self._statistics = statistics
        self._in_line = False

    def on_event(self, event: RunEvent) -> None:
        """Show one event of a run."""
        match event:
            case wire.TextDelta():
                self._text.write(printable(event.delta))
                self._text.flush()
                self._in_line = not event.delta.endswith("\n")
            case ToolStarted(call):
                self.note(f"[{call.name[:_SHOWN]} {_json(call.arguments, _SHOWN)}]")
            case ToolDone(call, output):
                self.note(f"[{call.name[:_SHOWN]}: {_outcome(output)}]")
            case wire.TurnDone(turn):
                self._end_line()
                if self._statistics:
                    self.note(summary(turn))

    def note(self, text: str) -> None:
        """Write a line beside the model's text."""
        self._end_line()
        self._notes.write(printable(text) + "\n")
        self._notes.flush()

    def _end_line(self) -> None:
        if self._in_line:
            self._text.write("\n")
            self._text.flush()
            self._in_line = False


def summary(turn: wire.Turn) -> str:
    """Return a turn's figures in one line: speed, cached tokens by tier, context."""
    usage, kv = turn.usage, turn.kv
    computed = usage.input_tokens - usage.cached_tokens  # of `new` another session may have some
    seconds = turn.timing_ms.decode / 1000
    speed = f", {usage.output_tokens / seconds:.1f} tok/s" if seconds else ""
    tiers = [
        f"{name} {count}" for name in ("device", "host", "disk") if (count := getattr(kv, name))
    ]
    where = f" ({', '.join(tiers)})" if tiers else ""
    return (
        f"[{usage.output_tokens} tokens{speed} | cached {usage.cached_tokens}{where}, "
        f"computed {computed} | context {turn.context.used} of {turn.context.limit}]"
    )


def _outcome(output: ToolOutput) -> str:
    text = output.output if isinstance(output.output, str) else _json(output.output, limit=None)
    first = text.strip().partition("\n")[0]
    shown = first[:_SHOWN] if output.is_error else f"{len(text)} characters"
    return f"{output.status}, {output.duration_ms} ms, {shown}"


def _json(value: Any, limit: int | None) -> str:
    text = printable(json.dumps(value, ensure_ascii=False, default=str))
    return text if limit is None or len(text) <= limit else f"{text[:limit]}..."
