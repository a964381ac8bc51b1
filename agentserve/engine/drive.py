"""Runs an Engine between two mailboxes: the same code in a thread and in a child process."""

import importlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from agentserve.clock import Clock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import Command, Down, Event, Ready, Stats
from agentserve.engine.plan import RunnerInfo

HEARTBEAT_S = 1.0
MAX_BATCHES = 16_384  # event batches that the reader may lag behind

log = logging.getLogger(__name__)


class EngineSpec(msgspec.Struct, frozen=True, tag="spec"):
    """All that an engine is made from.

    `factory` is "module:function"; the function takes `options` and returns
    (Runner, Compiler | None).
    """

    factory: str
    options: dict[str, Any]
    settings: EngineSettings
    incarnation: int = 1


class ReaderStalled(RuntimeError):
    """Nobody has read the engine's events for MAX_BATCHES steps."""


class CommandSource(Protocol):
    """Where the engine gets its commands from; it sleeps there while it is idle."""

    def take(self, timeout: float) -> list[Command] | None:
        """Wait up to `timeout` seconds for commands; None says that the engine is to stop."""
        ...

    def wake(self) -> None:
        """Wake the engine without a command; from any thread."""
        ...


class EventSink(Protocol):
    """Where the engine's event batches go. Putting never waits."""

    def put(self, batch: list[Event]) -> None:
        """Take a batch, unless it `joins` none that wait. Raises ReaderStalled as that does."""
        ...

    def put_last(self, batch: list[Event]) -> None:
        """Take a batch however many wait: the engine's last words."""
        ...


def joins(batch: list[Event], waiting: int, most: int = MAX_BATCHES) -> bool:
    """Whether a batch is queued behind `waiting` others that nobody has read: no mere heartbeat is.

    Raises ReaderStalled when there are too many: a turn must not lose events silently.
    """
    if waiting and all(isinstance(event, Stats) for event in batch):
        return False
    if waiting >= most:
        raise ReaderStalled(f"{most} event batches were not read")
    return True


class Inbox:
    """Commands on their way to the engine; it sleeps here while it is idle."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._closed = False
        self._woken = False

    def put(self, commands: Sequence[Command]) -> None:
        """Queue commands and wake the engine."""
        with self._changed:
            self._commands += commands
            self._changed.notify()

    def wake(self) -> None:
        """Wake the engine without a command."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Make the engine stop before its next step."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, timeout: float) -> list[Command] | None:
        """Wait up to `timeout` seconds for commands; None once the inbox is closed."""
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(
                    lambda: self._commands or self._closed or self._woken, timeout
                )
            if self._closed:
                return None
            commands, self._commands = self._commands, []
            self._woken = False
            return commands


class Outbox:
    """Event batches on their way to the reader. Putting never waits."""

    def __init__(self, notify: Callable[[], None], max_batches: int = MAX_BATCHES) -> None:
        self._notify = notify
        self._max = max_batches
        self._batches: deque[list[Event]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def put(self, batch: list[Event]) -> None:
        """Queue a batch that `joins` the others. Raises ReaderStalled."""
        if joins(batch, len(self._batches), self._max):
            self.put_last(batch)

    def put_last(self, batch: list[Event]) -> None:
        """Queue a batch however full the queue is."""
        self._batches.append(batch)
        self._notify()

    def take(self) -> list[Event] | None:
        """Return the oldest batch, None when there is none."""
        return self._batches.popleft() if self._batches else None


def run_engine(spec: EngineSpec, inbox: CommandSource, outbox: EventSink, clock: Clock) -> bool:
    """Build the engine, say Ready and step it until the inbox is closed.

    Returns whether it ended by being closed. What it dies of is logged and sent as Down.
    """
    engine = None
    try:
        engine, info = _build(spec, clock, inbox.wake)
        outbox.put([Ready(info, spec.incarnation)])
        drive(engine, inbox, outbox, clock)
    except (Exception, SystemExit) as error:
        # Settings that no start can work with say all in one line.
        plain = engine is None and isinstance(error, ValueError)
        log.error("the engine died: %s", error, exc_info=None if plain else error)  # noqa: TRY400
        outbox.put_last([Down(describe(error))])
        return False
    finally:
        if engine is not None:
            engine.close()
    return True


def drive(engine: Engine, inbox: CommandSource, outbox: EventSink, clock: Clock) -> None:
    """Apply commands and step until the inbox is closed; sleep while there is nothing to do.

    All events of a step leave in one batch; an idle engine sends Stats every HEARTBEAT_S seconds.
    """
    beat = clock.monotonic()
    while True:
        idle_s = 0.0
        if not engine.busy:
            idle_s = max(0.0, min(beat + HEARTBEAT_S - clock.monotonic(), engine.wake_in()))
        commands = inbox.take(idle_s)
        if commands is None:
            return
        for command in commands:
            engine.apply(command)
        events = engine.step()
        now = clock.monotonic()
        if not events and now - beat >= HEARTBEAT_S:
            events = [engine.stats()]
        if events:
            outbox.put(events)
            beat = now


def describe(error: BaseException) -> str:
    """Return an exception as one bounded line for a person."""
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _build(spec: EngineSpec, clock: Clock, wake: Callable[[], None]) -> tuple[Engine, RunnerInfo]:
    module, _, function = spec.factory.partition(":")
    factory = getattr(importlib.import_module(module), function)
    runner, compiler = factory(spec.options)
    if compiler is not None:
        compiler.listen(wake)
    return Engine(runner, clock, spec.settings, compiler), runner.info
