"""Which idle sequence loses its device blocks first.

A policy orders what it is told of the idle sequences and decides nothing else: blocks are taken
only when somebody needs them, and an idle sequence locks none. Hints of the client and the queue of
waiting turns come before any estimate, under every policy. Times are the engine clock's seconds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentserve.kv.gaps import EDGES, LAST_S, Floats, GapModel, at, hazard, hinted, usable

PERSON_RETURNS = 0.5  # chance that a person whose turn ended asks again; a tool nearly always does
ENOUGH_TRUST = 0.3  # in hints, for them to stand in for samples


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

    def settle(self) -> None:
        """Do what taking note has left to be done; `order` needs it and does it too."""
        ...


# Groups of victims, coldest first. EXPIRED and HELD differ only for a policy that estimates.
DROPPED, DEMOTED, EXPIRED, HELD, KEPT, RETURNING = range(6)


def group(idle: Idle) -> int:
    """Return the group that hints and queue put it in; EXPIRED where they say nothing."""
    if idle.queued or idle.promoted:
        return RETURNING
    return {"drop": DROPPED, "host": DEMOTED, "device": KEPT}.get(idle.kv, EXPIRED)


def sort_key(idle: Idle, where: int, value: float = 0.0) -> tuple[float, ...]:
    """Return what to sort by: group `where`, clean before dirty, `value`, then least recently used.

    Dirty sequences come later because what they lose must be saved first, or computed again.
    Returning ones are taken from the queue's end, where an announced turn that is not queued yet
    also stands, so that whoever is ahead in the queue can always be served.
    """
    if where == RETURNING:
        return (where, -idle.queued if idle.queued else -float("inf"), 0.0, idle.since)
    return (where, not idle.clean, value, idle.since)


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

    def settle(self) -> None:
        """Do nothing."""


class ToolAware(Lru):
    """Those first whose return soon is least likely, by how long each tool has taken so far.

    A sequence is held while the chance per second of its return, times the seconds that its room on
    the device saves, is worth the price of that room; those that are not come first. Where too
    little was learned the order is that of Lru.
    """

    def __init__(self) -> None:
        super().__init__("tool-aware")
        self._gaps = GapModel()
        self._noted: list[Callable[[], None]] = []  # a quarter of a millisecond each

    def order(self, idle: Iterable[Idle], now: float, costs: Costs) -> list[Idle]:
        """Return them coldest first."""
        self.settle()
        places = {each: (group(each), 0.0) for each in idle}
        open_ones = [each for each, (where, _) in places.items() if where == EXPIRED]
        if open_ones:
            places.update(zip(open_ones, self._estimate(open_ones, now, costs), strict=True))
        return sorted(places, key=lambda each: sort_key(each, *places[each]))

    def learn(self, idle: Idle, returned_at: float) -> None:
        """Take note of how long it was away, and of how right the client's word was."""
        away = max(0.0, returned_at - idle.since)
        self._noted.append(partial(self._gaps.learn, idle.namespace, idle.tools, away))
        if idle.expected_s is not None:
            said, actual = idle.expected_s, returned_at - max(idle.since, idle.hinted_at)
            self._noted.append(partial(self._gaps.learn_hint, idle.namespace, said, actual))

    def settle(self) -> None:
        """Learn from what was noted."""
        noted, self._noted = self._noted, []
        for learn in noted:
            learn()

    def _estimate(self, idle: list[Idle], now: float, costs: Costs) -> list[tuple[int, float]]:
        """Return the group, EXPIRED or HELD, and the value to sort by of each."""
        cdf, trained = self._distributions(idle)
        if not trained.any():
            return [(EXPIRED, 0.0)] * len(idle)
        age = np.array([max(0.0, now - each.since) for each in idle])
        saved = np.array([saving(each, costs) for each in idle])
        saved[~trained] = saved.mean()  # no reason to prefer one of these to another but its age
        values = hazard(cdf, age) * saved
        if costs.pressure > 0:
            held, chance = worth_holding(cdf, age, saved, costs.pressure)
            held = _at_most(held & trained, chance, idle, costs.pool_tokens / 2)
            values = np.where(held, chance, values)
        else:
            held = np.zeros(len(idle), dtype=bool)
        return [
            (HELD if hold else EXPIRED, value)
            for hold, value in zip(held.tolist(), values.tolist(), strict=True)
        ]

    def _distributions(self, idle: list[Idle]) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the gap's distribution for each, and whether there is enough behind it."""
        kinds: dict[tuple[str, tuple[str, ...]], int] = {}
        kind = [kinds.setdefault((each.namespace, each.tools), len(kinds)) for each in idle]
        known = [self._gaps.cdf(*each) for each in kinds]
        cdf = np.array([each for each, _ in known])[kind]
        trained = np.array([each for _, each in known])[kind]
        hints = [place for place, each in enumerate(idle) if usable(each.expected_s)]
        if hints:
            asked = {idle[place].namespace for place in hints}
            believed = {namespace: self._gaps.trust(namespace) for namespace in asked}
            judged = np.array([believed[idle[place].namespace] for place in hints])
            trust, spread = judged[:, 0], judged[:, 1]
            total = np.array([_hinted_gap(idle[place]) for place in hints])
            cdf[hints] += trust[:, None] * (hinted(total, spread) - cdf[hints])
            trained[hints] |= trust >= ENOUGH_TRUST
        return cdf, trained


def _hinted_gap(idle: Idle) -> float:
    return max(0.0, idle.hinted_at - idle.since) + (idle.expected_s or 0.0)


def saving(idle: Idle, costs: Costs) -> float:
    """Return the seconds that its next turn is spared when its KV is still on the device."""
    back = costs.prefill_s(idle.tokens)
    if idle.clean:
        back = min(back, costs.reload_s * idle.tokens)
    return back + (1.0 if idle.tools else PERSON_RETURNS) * costs.delay_s


def worth_holding(
    cdf: Floats, age: Floats, saved: Floats, pressure: float
) -> tuple[NDArray[np.bool_], Floats]:
    """Return per row whether room is worth keeping at all now, and how likely it will have paid.

    Room that is kept for up to t more seconds costs `pressure` times the expected time until the
    return or t, and fails to save `saved` seconds if the return comes later. The best t of the
    bins' edges is compared with giving the room up at once; the chance is that of a return by then.
    """
    age = np.clip(age, 0.0, LAST_S)
    alive = 1 - cdf
    areas = np.diff(EDGES) * (alive[:, :-1] + alive[:, 1:]) / 2
    lasted = np.concatenate([np.zeros((len(cdf), 1)), np.cumsum(areas, axis=1)], axis=1)
    row, place = np.arange(len(cdf)), np.searchsorted(EDGES, age, side="right") - 1
    still = 1 - at(cdf, age)
    so_far = lasted[row, place] + (age - EDGES[place]) * (alive[row, place] + still) / 2
    late = alive / still[:, None]
    cost = pressure * (lasted - so_far[:, None]) / still[:, None] + late * saved[:, None]
    cost[age[:, None] >= EDGES] = np.inf  # not in the future
    best = cost.argmin(axis=1)
    return cost[row, best] < saved * (1 - 1e-9), np.asarray(1 - late[row, best])


def _at_most(
    held: NDArray[np.bool_], chance: Floats, idle: list[Idle], tokens: float
) -> NDArray[np.bool_]:
    """Return `held` without the least likely to pay, so that they have `tokens` at most."""
    kept = np.zeros_like(held)
    places = np.flatnonzero(held).tolist()
    for place in sorted(places, key=lambda p: (-chance[p], -idle[p].since)):
        if idle[place].tokens <= tokens:
            tokens -= idle[place].tokens
            kept[place] = True
    return kept


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
