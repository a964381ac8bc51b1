"""The queue of waiting turns: fair between sequences, and no wait without a bound.

Each sequence has a virtual time, `Sequence.service`: the seconds of engine time that its turns were
charged for. The turn of the sequence that had least goes first, but within a band of one typical
turn's service one that still has its KV on the device is preferred, so that locality never costs
more unfairness than that. A sequence that was away comes back no earlier than the virtual time
then in force: waiting for a tool saves up no credit.

A turn is overdue after 20 s. Overdue and preempted turns go before all others, first come first
served, so nobody who came later can overtake an overdue turn (INV-09).
"""

from collections.abc import Callable, Iterator

from agentserve.clock import Clock
from agentserve.engine.sequence import Sequence, Turn

OVERDUE_S = 20.0
FIRST_BAND_S = 0.5  # until turns have ended that show what is typical
BAND_WEIGHT = 0.1  # of the newest ended turn in the mean


class TurnQueue:
    """Turns that wait for admission. `resident` says whether a turn's KV is on the device."""

    def __init__(self, clock: Clock, resident: Callable[[Turn], bool] = lambda turn: False) -> None:
        self._clock = clock
        self._resident = resident
        self._turns: dict[Turn, bool] = {}  # whether it was preempted
        self._active: dict[Sequence, float] = {}  # service when its open turn arrived
        self._floor = 0.0  # virtual time in force; never goes back
        self._band = FIRST_BAND_S

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._turns

    def __iter__(self) -> Iterator[Turn]:
        """Iterate in queue order as of now."""
        return iter(sorted(self._turns, key=self._key()))

    @property
    def wanted(self) -> bool:
        """Whether a turn waits that is not a background turn."""
        return any(not turn.command.background for turn in self._turns)

    def add(self, turn: Turn) -> None:
        """Queue a new turn."""
        if not turn.command.background:
            self._arrive(turn.sequence)
        self._turns[turn] = False

    def put_back(self, turn: Turn) -> None:
        """Queue a turn that was preempted, ahead of all that are not overdue."""
        self._turns[turn] = True

    def remove(self, turn: Turn) -> None:
        """Take a turn out. Raises KeyError when it is not in the queue."""
        del self._turns[turn]

    def head(self) -> Turn | None:
        """Return the turn to admit next; None when the queue is empty."""
        return min(self._turns, key=self._key(), default=None)

    def overdue(self) -> int:
        """Return how many turns have waited too long."""
        due = self._clock.monotonic() - OVERDUE_S
        return sum(turn.submitted_at <= due for turn in self._turns)

    def charge(self, sequence: Sequence, seconds: float) -> None:
        """Count engine time that a turn of `sequence` used; what is not positive counts nothing."""
        if seconds > 0:
            sequence.service += seconds

    def _arrive(self, sequence: Sequence) -> None:
        """Raise the newcomer to the smallest virtual time of those that have an open turn."""
        if self._active:
            self._floor = max(self._floor, min(each.service for each in self._active))
        ended = [each for each in self._active if each is sequence or each.turn is None]
        for each in ended:
            spent = each.service - self._active.pop(each)
            self._band += BAND_WEIGHT * (spent - self._band)
        sequence.service = max(sequence.service, self._floor)
        self._active[sequence] = sequence.service

    def _key(self) -> Callable[[Turn], tuple[float, ...]]:
        """Return what to sort by, as of now."""
        due = self._clock.monotonic() - OVERDUE_S
        normal = [
            turn.sequence.service for turn, preempted in self._turns.items()
            if not preempted and turn.submitted_at > due and not turn.command.background
        ]  # fmt: skip
        least = min(normal, default=0.0)

        def key(turn: Turn) -> tuple[float, ...]:
            if turn.command.background:
                return (3, turn.arrival)
            if self._turns[turn] or turn.submitted_at <= due:
                return (0, turn.submitted_at, turn.arrival)
            ahead = turn.sequence.service - least
            if ahead <= self._band:
                return (1, not self._resident(turn), turn.arrival)
            return (2, ahead, turn.arrival)

        return key
