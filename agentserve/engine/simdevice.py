"""A simulated device: streams that run in any legal order, and a detector of unordered accesses.

It implements `copier.Device`. Each stream is a queue of operations that run first in, first out;
between streams nothing is ordered but by events, and `advance` runs whatever a seeded choice picks
among the operations that may run now. Memory is two tiers of slots.

Every stream has a vector clock, and so has the host (the engine loop): an operation knows what its
stream knew and what the host knew when it was queued; waiting for an event, or the host's seeing it
done, adds what the event's stream knew at the record (Fidge 1988, Mattern 1989). Two accesses to
one slot, of which one is a write, must be ordered by that knowledge. If they are not, RaceError
names both, whether or not this run happened to order them well. With `host_orders=False` the
host's seeing an event orders nothing: all order must be in events that streams wait for.

A slot is poisoned while a copy fills it and when it is freed, so that what reads it too early is
wrong even where no race is found.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentserve.engine.plan import Copy

STREAMS = ("compute", "save", "load")
POISON = b"\xff"
_TIERS = {"device": ("device", "device"), "save": ("device", "host"), "load": ("host", "device")}
_SPEEDS = (0.03, 1.0, 1.0, 20.0)  # how much likelier than others a stream is to go on

Knowledge = dict[str, int]  # stream -> how many of its operations are known to have ended


class RaceError(Exception):
    """Two accesses to one slot, one of them a write, that nothing orders."""


class StuckError(Exception):
    """Every stream waits for an event that never comes."""


class Place(NamedTuple):
    """One slot."""

    tier: str
    group: int
    slot: int

    def __str__(self) -> str:
        return f"{self.tier} slot {self.slot} of group {self.group}"


class Event:
    """A point in a stream. `known` is None until the stream has reached it."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Knowledge | None = None


class _Access(NamedTuple):
    stream: str
    number: int  # among the operations of its stream
    name: str


@dataclass(slots=True)
class _History:
    """The last write of a slot, and each stream's last read since then."""

    writer: _Access | None = None
    readers: dict[str, _Access] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Operation:
    """An access to memory, or a wait for or a record of an event."""

    name: str
    known: Knowledge  # by the host when it queued this
    reads: Iterable[Place] = ()
    writes: Iterable[Place] = ()
    run: Callable[[], None] | None = None
    waits: Event | None = None
    records: Event | None = None


class SimDevice:
    """Two tiers of slots and three streams. Time passes only in `advance`, `finish` and `block`.

    `token_bytes` has one entry per KV group. `rng` decides every order and how slow each stream is.
    """

    def __init__(
        self,
        token_bytes: Sequence[int],
        block_size: int,
        num_blocks: int,
        host_blocks: int,
        rng: random.Random,
        *,
        host_orders: bool = True,
    ) -> None:
        self._rng = rng
        self._host_orders = host_orders
        self._token_bytes = token_bytes
        self.memory = {
            tier: [
                [bytearray(POISON * block_size * size) for _ in range(count)]
                for size in token_bytes
            ]
            for tier, count in (("device", num_blocks), ("host", host_blocks))
        }
        self._queues: dict[str, deque[_Operation]] = {stream: deque() for stream in STREAMS}
        self._speeds = {stream: rng.choice(_SPEEDS) for stream in STREAMS}
        self._clocks = {stream: dict.fromkeys(STREAMS, 0) for stream in STREAMS}
        self._host: Knowledge = dict.fromkeys(STREAMS, 0)
        self._histories: dict[Place, _History] = {}

    # What the copier uses

    def record(self, stream: str) -> Event:
        """Return an event that passes when all work queued on `stream` so far has ended."""
        event = Event()
        self._queue(stream, _Operation("record", self._known(), records=event))
        return event

    def wait(self, stream: str, event: Event) -> None:
        """Let work queued on `stream` from now on start after `event`."""
        self._queue(stream, _Operation("wait", self._known(), waits=event))

    def copy(self, stream: str, copy: Copy) -> None:
        """Queue a copy: its target is poison from its start to its end, some time later."""
        from_tier, to_tier = _TIERS[copy.kind]
        source = Place(from_tier, copy.group, copy.source)
        target = Place(to_tier, copy.group, copy.target)
        name = f"{copy.kind} {copy.ticket}"
        size = copy.tokens * self._token_bytes[copy.group]
        self.queue(stream, f"start of {name}", [source], [target], lambda: self._poison(target))

        def fill() -> None:
            self.bytes(target)[:size] = self.bytes(source)[:size]

        self.queue(stream, f"end of {name}", [source], [target], fill)

    def done(self, event: Event) -> bool:
        """Whether the stream has reached `event`; if so, the host knows what it knew."""
        if event.known is not None and self._host_orders:
            _join(self._host, event.known)
        return event.known is not None

    def block(self, events: Sequence[Event], timeout_s: float) -> None:
        """Let time pass until one of `events` is done, or, now and then, too little of it."""
        while events and not any(event.known for event in events):
            if self._rng.random() < 0.05:
                return
            self._go_on()

    # What a runner and tests use

    def queue(
        self,
        stream: str,
        name: str,
        reads: Iterable[Place],
        writes: Iterable[Place],
        run: Callable[[], None],
    ) -> None:
        """Queue work that reads and writes whole slots; `run` does it."""
        self._queue(stream, _Operation(name, self._known(), reads, writes, run))

    def free(self, place: Place) -> None:
        """Poison a slot that nobody owns any more; a copy still using it is a race."""
        stream = "compute"
        if place.tier == "host":
            stream = "save"  # only saves write there
            self.wait(stream, self.record("compute"))
        self.queue(stream, f"freeing of {place}", (), [place], lambda: self._poison(place))

    def bytes(self, place: Place) -> bytearray:
        """Return the memory of a slot."""
        return self.memory[place.tier][place.group][place.slot]

    def advance(self, operations: int) -> None:
        """Run up to `operations` operations, each of a stream chosen among those that can go on."""
        for _ in range(operations):
            ready = [stream for stream in STREAMS if self._ready(stream)]
            if not ready:
                return
            speeds = [self._speeds[stream] for stream in ready]
            self._run(self._rng.choices(ready, speeds)[0])

    def finish(self, event: Event | None = None) -> None:
        """Let time pass until `event` is done and the host knows; without one, until all is done.

        Raises StuckError when that never happens.
        """
        while any(self._queues.values()) if event is None else not self.done(event):
            self._go_on()

    def _go_on(self) -> None:
        if not any(self._ready(stream) for stream in STREAMS):
            heads = {stream: queue[0].name for stream, queue in self._queues.items() if queue}
            raise StuckError(f"no stream can go on: {heads}")
        self.advance(1)

    def _ready(self, stream: str) -> bool:
        queue = self._queues[stream]
        return bool(queue) and (queue[0].waits is None or queue[0].waits.known is not None)

    def _run(self, stream: str) -> None:
        operation = self._queues[stream].popleft()
        clock = self._clocks[stream]
        _join(clock, operation.known)
        if operation.waits is not None and operation.waits.known is not None:
            _join(clock, operation.waits.known)
        clock[stream] += 1
        access = _Access(stream, clock[stream], operation.name)
        for place in operation.reads:
            self._read(place, access, clock)
        for place in operation.writes:
            self._write(place, access, clock)
        if operation.run is not None:
            operation.run()
        if operation.records is not None:
            operation.records.known = clock.copy()

    def _read(self, place: Place, access: _Access, clock: Knowledge) -> None:
        history = self._histories.setdefault(place, _History())
        _check(place, history.writer, access, clock)
        history.readers[access.stream] = access

    def _write(self, place: Place, access: _Access, clock: Knowledge) -> None:
        history = self._histories.setdefault(place, _History())
        for earlier in (history.writer, *history.readers.values()):
            _check(place, earlier, access, clock)
        self._histories[place] = _History(access)

    def _queue(self, stream: str, operation: _Operation) -> None:
        self._queues[stream].append(operation)

    def _known(self) -> Knowledge:
        return self._host.copy()

    def _poison(self, place: Place) -> None:
        memory = self.bytes(place)
        memory[:] = POISON * len(memory)


def _check(place: Place, earlier: _Access | None, access: _Access, clock: Knowledge) -> None:
    if earlier is not None and clock[earlier.stream] < earlier.number:
        raise RaceError(
            f"{place}: {access.name!r} on {access.stream!r} is not ordered after "
            f"{earlier.name!r} on {earlier.stream!r}"
        )


def _join(knowledge: Knowledge, more: Knowledge) -> None:
    for stream, count in more.items():
        if count > knowledge[stream]:
            knowledge[stream] = count
