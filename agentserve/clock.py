"""Time as an argument: everything that decides takes a Clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for durations, Unix seconds for dates."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; never goes back."""
        ...

    def time(self) -> float:
        """Return seconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; never goes back."""
        return time.monotonic()

    def time(self) -> float:
        """Return seconds since 1970-01-01 UTC."""
        return time.time()


class VirtualClock:
    """A clock that moves only when it is told to, for tests and simulation."""

    def __init__(self, start: float = 0.0, epoch: float = 1_700_000_000.0) -> None:
        self._now = start
        self._epoch = epoch

    def monotonic(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def time(self) -> float:
        """Return the virtual Unix time."""
        return self._epoch + self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
