"""Which idle sequence loses its device blocks first.

A policy orders what it is told of the idle sequences and decides nothing else: blocks are taken
only when somebody needs them, and an idle sequence locks none. Hints of the client and the queue of
waiting turns come before any estimate, under every policy. Times are the engine clock's seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Idle:
    """What is known of a sequence that has no running turn."""

    namespace: str
    since: float  # when its last turn ended
    tools: tuple[str, ...] = ()  # what it waits for; empty: a person, or unknown
    expected_s: float | None = None  # the client's word, counted from `hinted_at`
    hinted_at: float = 0.0
    kv: str = "auto"  # auto | device | host | drop
    tokens: int = 0  # tokens of KV that it has in any tier
    clean: bool = True  # everything of it on the device has a host copy
    queued: int = 0  # place in the queue of waiting turns, 1 is the head; 0: it is idle
    promoted: bool = False  # its next turn was announced


@dataclass(frozen=True, slots=True)
class Costs:
    """What time and room cost now, by measurement.

    Prefill of x tokens after c others takes base + token*x + pair*x*(c + x/2) seconds.
    """

    reload_s: float  # seconds to copy one token's KV from host to device
    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    pool_tokens: int  # tokens that the device tier holds
    pressure: float  # price of device room, 0 (nobody misses it) .. 1
    delay_s: float  # extra queueing that a turn met whose KV had left the device

    def prefill_s(self, count: int, start: int = 0) -> float:
        """Return the seconds to prefill `count` tokens after `start`."""
        pairs = count * (start + count / 2)
        return self.prefill_base_s + self.prefill_token_s * count + self.prefill_pair_s * pairs


class Policy(Protocol):
    """The order in which idle sequences lose their device blocks."""

    name: str
    keeps: bool  # False: nothing is kept between turns
    uses_host: bool

    def order(self, idle: Iterable[Idle], now: float, costs: Costs) -> list[Idle]:
        """Return them coldest first: the first is the first to lose its device blocks."""
        ...

    def learn(self, idle: Idle, returned_at: float) -> None:
        """Take note that a turn of this sequence came at `returned_at`."""
        ...


# Groups of victims, coldest first. EXPIRED and HELD differ only for a policy that estimates.
DROPPED, DEMOTED, EXPIRED, HELD, KEPT, RETURNING = range(6)


def group(idle: Idle) -> int:
    """Return the group that hints and queue put it in; EXPIRED where they say nothing."""
    if idle.queued or idle.promoted:
        return RETURNING
    return {"drop": DROPPED, "host": DEMOTED, "device": KEPT}.get(idle.kv, EXPIRED)


def sort_key(idle: Idle, group: int, value: float = 0.0) -> tuple[float, ...]:
    """Return what to sort by: group, clean before dirty, `value`, then least recently used.

    Dirty sequences come later because what they lose must be saved first, or computed again.
    Returning ones are taken from the queue's end, where an announced turn that is not queued yet
    also stands, so that whoever is ahead in the queue can always be served.
    """
    if group == RETURNING:
        return (group, -idle.queued if idle.queued else -float("inf"), 0.0, idle.since)
    return (group, not idle.clean, value, idle.since)


class Lru:
    """Least recently used first."""

    def __init__(self, name: str, *, keeps: bool = True, uses_host: bool = True) -> None:
        self.name = name
        self.keeps = keeps
        self.uses_host = uses_host

    def order(self, idle: Iterable[Idle], now: float, costs: Costs) -> list[Idle]:
        """Return them coldest first."""
        return sorted(idle, key=lambda each: sort_key(each, group(each)))

    def learn(self, idle: Idle, returned_at: float) -> None:
        """Do nothing: the order needs no history."""


class ToolAware(Lru):
    """Those first whose return soon is least likely, by how long each tool has taken so far."""

    def __init__(self) -> None:
        super().__init__("tool-aware")


POLICIES = ("none", "device-lru", "lru+host", "tool-aware")


def make_policy(name: str) -> Policy:
    """Return a new policy. Raises ValueError, naming the choices, for an unknown name."""
    if name == "none":
        return Lru(name, keeps=False, uses_host=False)
    if name == "device-lru":
        return Lru(name, uses_host=False)
    if name == "lru+host":
        return Lru(name)
    if name == "tool-aware":
        return ToolAware()
    raise ValueError(f"no such KV policy: {name!r}; choose one of {', '.join(POLICIES)}")
