"""Copies between tiers, ordered so that none reads or writes a block at the wrong time.

The order is made of events only, so it holds whether a device runs work at once, in a thread or on
side streams, and however many steps are in flight:

1. A copy starts after all compute work that was queued before it: a save reads what those rows
   wrote, a load overwrites what they read.
2. A copy starts after every earlier copy of the other direction that shares a slot with it, in
   either tier. Copies of one direction are in order anyway: they share a stream.
3. Compute work that is queued after a ticket was reported starts after that copy. With rule 1,
   whatever is planned because a ticket came back is ordered behind the copy.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentserve.engine.plan import Copy

REMEMBERED = 1 << 16  # ended tickets that can be reported again


class Device(Protocol):
    """Two tiers of block slots and three queues of work: "compute", "save" and "load".

    A stream runs its work in order; streams run beside each other. An event is opaque.
    """

    def record(self, stream: str) -> Any:
        """Return an event: all work that has been queued on the stream so far."""
        ...

    def wait(self, stream: str, event: Any) -> None:
        """Let work that is queued on the stream from now on start after the event."""
        ...

    def copy(self, stream: str, copy: Copy) -> None:
        """Queue one block copy between the tiers."""
        ...

    def done(self, event: Any) -> bool:
        """Return whether the event's work has ended."""
        ...

    def block(self, events: Sequence[Any], timeout_s: float) -> None:
        """Return when one of the events is done, at the latest after the timeout."""
        ...


@dataclass(slots=True)
class _Flight:
    """A copy that was queued and whose ticket has not been reported."""

    copy: Copy
    event: Any


class Copier:
    """Queues saves and loads on a device and reports the tickets of those that ended."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Loads are polled first: turns wait for them.
        self._flights: dict[str, deque[_Flight]] = {"load": deque(), "save": deque()}
        self._users: dict[tuple[str, str, int, int], _Flight] = {}  # the last one on each slot
        self._ended: OrderedDict[int, None] = OrderedDict()

    def submit(self, copies: Sequence[Copy]) -> None:
        """Queue a plan's saves and loads; called before the rows of that plan are queued.

        Raises ValueError for any other kind of copy.
        """
        kinds = dict.fromkeys(copy.kind for copy in copies)
        if unknown := kinds.keys() - self._flights.keys():
            raise ValueError(f"copies of kind {unknown} do not move between tiers")
        if kinds:
            computed = self._device.record("compute")
        for kind in kinds:
            self._device.wait(kind, computed)
        for copy in copies:
            self._queue(copy)

    def poll(self) -> list[int]:
        """Return the tickets that have ended since the last call."""
        tickets: list[int] = []
        for flights in self._flights.values():
            landed = None
            while flights and self._device.done(flights[0].event):
                landed = flights.popleft()
                tickets.append(landed.copy.ticket)
                self._forget(landed)
            if landed is not None:
                # The last of a stream stands for those before it. That it is done is known to this
                # thread only; the device's own order must say so too.
                self._device.wait("compute", landed.event)
        self._remember(tickets)
        return tickets

    def wait(self, timeout_s: float) -> None:
        """Return when a copy in flight has ended, at the latest after `timeout_s`.

        Returns at once when none is in flight.
        """
        if first := [flights[0].event for flights in self._flights.values() if flights]:
            self._device.block(first, timeout_s)

    def again(self, tickets: Sequence[int]) -> list[int]:
        """Return those of `tickets` that `poll` has reported before; asking changes nothing.

        Only the latest REMEMBERED are known. Any other ticket is never said to have ended.
        """
        return [ticket for ticket in tickets if ticket in self._ended]

    def _queue(self, copy: Copy) -> None:
        other = "save" if copy.kind == "load" else "load"
        slots = _slots(copy)
        for slot in slots:
            if (earlier := self._users.get((other, *slot))) is not None:
                self._device.wait(copy.kind, earlier.event)
        self._device.copy(copy.kind, copy)
        flight = _Flight(copy, self._device.record(copy.kind))
        self._flights[copy.kind].append(flight)
        for slot in slots:
            self._users[copy.kind, *slot] = flight

    def _forget(self, flight: _Flight) -> None:
        for slot in _slots(flight.copy):
            if self._users.get((flight.copy.kind, *slot)) is flight:
                del self._users[flight.copy.kind, *slot]

    def _remember(self, tickets: Sequence[int]) -> None:
        self._ended.update(dict.fromkeys(tickets))
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


def _slots(copy: Copy) -> list[tuple[str, int, int]]:
    """Return (tier, group, slot) of both ends of a save or load."""
    tiers = ("device", "host") if copy.kind == "save" else ("host", "device")
    return [(tiers[0], copy.group, copy.source), (tiers[1], copy.group, copy.target)]
