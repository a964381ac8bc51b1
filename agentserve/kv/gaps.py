"""How long a sequence stays away between two turns: what was learned, per tool.

A *gap* runs from a turn's end to the next turn's arrival. Each (namespace, tool key) has a
histogram of gaps with logarithmic bins, in which old samples fade. A key "name:arguments" is shrunk
towards "name", that towards all tools of the namespace, and that towards a flat prior, so few
samples say little. Namespaces learn nothing from each other. Keys and namespaces are bounded; the
least recently learned go. The gap of parallel calls is that of the slowest.

Distributions are arrays of P(gap <= EDGES[i]), one row per case, so that many are read at once.
The last is below 1: the rest is the chance that the gap is longer than an hour.
"""

import math
from collections import OrderedDict, deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS = 64
SHORTEST_S, LONGEST_S = 0.01, 3600.0
EDGES: Floats = np.geomspace(SHORTEST_S, LONGEST_S, BINS + 1).astype(np.float64)
STEP = math.log(LONGEST_S / SHORTEST_S) / BINS  # width of a bin, as a logarithm
CENTRES: Floats = np.add(math.log(SHORTEST_S), STEP * (np.arange(BINS + 1) + 0.5))  # logarithms
EDGES[0] = 0.0
LAST_S = float(EDGES[-2])  # ages beyond are treated like this one
WINDOW_S = 0.1  # over which a hazard is averaged at the least
# What is believed before anything is known: flat over the logarithm of time, so that the hazard
# falls with age, and as much as 8 bins for gaps of more than an hour.
PRIOR: Floats = np.append(np.ones(BINS), 8.0) / (BINS + 8)
DECAY = 0.5 ** (1 / 500)  # of a sample's weight with each later one
SHRINK = 20.0  # samples that a parent counts for
TRAINED = 20.0  # samples from which a namespace's gaps are worth believing
MAX_CALLS = 16  # parallel calls that are looked at
MAX_KEYS = 256  # of one namespace
MAX_NAMESPACES = 64
PERSON = ""  # the key of waits for a person, or for something unknown

HINTS = 64  # that a client is judged by
HINTS_TO_TRUST = 4.0  # right hints that earn half of the trust
MOST_TRUST = 0.95
WORST_ERROR = math.log(3)  # a typical error from which hints are ignored


def at(cdf: Floats, seconds: Floats) -> Floats:
    """Return per row P(gap <= seconds), for `cdf` (n, BINS + 1) and `seconds` (n,)."""
    place = np.clip(np.searchsorted(EDGES, seconds, side="right") - 1, 0, BINS - 1)
    part = np.clip((seconds - EDGES[place]) / (EDGES[place + 1] - EDGES[place]), 0.0, 1.0)
    row = np.arange(len(cdf))
    below = cdf[row, place]
    return np.asarray(below + part * (cdf[row, place + 1] - below))


def residual(cdf: Floats, age: Floats, ahead: Floats) -> Floats:
    """Return per row P(gap - age <= ahead), given that it has lasted `age` seconds."""
    age = np.clip(age, 0.0, LAST_S)
    before = at(cdf, age)
    return np.asarray((at(cdf, age + ahead) - before) / np.maximum(1 - before, 1e-300))


def hazard(cdf: Floats, age: Floats) -> Floats:
    """Return per row the chance per second that the gap ends, given that it has lasted `age`.

    Averaged over the next half of the age, so that it does not follow the noise of single bins.
    """
    known = np.clip(age, 0.0, LAST_S)
    window = np.maximum(WINDOW_S, known / 2)
    beyond = np.maximum(age, LAST_S) / LAST_S  # 1 up to LAST_S
    return np.asarray(residual(cdf, known, window) / window / beyond)


def hinted(seconds: Floats, spread: Floats) -> Floats:
    """Return the distributions that hints of `seconds` (n,) stand for; `spread` in log units."""
    middle = np.log(np.clip(seconds, SHORTEST_S, LONGEST_S))
    mass = np.exp(-np.abs(CENTRES - middle[:, None]) / np.maximum(spread, STEP)[:, None])
    return _cumulative(mass / mass.sum(axis=1, keepdims=True))


class Histogram:
    """Gaps of one key; a sample is a distribution over the bins, since it can be uncertain."""

    __slots__ = ("mass", "total")

    def __init__(self) -> None:
        self.mass: Floats = np.zeros(BINS + 1)  # the last for more than an hour
        self.total = 0.0  # of `mass`: samples, by weight

    def add(self, sample: Floats) -> None:
        """Count one sample; all earlier ones fade a little."""
        self.mass *= DECAY
        self.mass += sample
        self.total = self.total * DECAY + 1.0


class _Namespace:
    """What is known of one namespace: its histograms, and how right its hints were."""

    def __init__(self) -> None:
        self.root = Histogram()
        self.keys: OrderedDict[str, Histogram] = OrderedDict()  # last learned last
        self.errors: deque[float] = deque(maxlen=HINTS)  # |log(hint / actual)|
        self.trust, self.spread = 0.0, WORST_ERROR
        self.cdfs: dict[tuple[str, ...], tuple[Floats, bool]] = {}  # since it last learned

    def chain(self, key: str) -> list[Histogram]:
        """Return the known histograms of `key`, most general first."""
        if key == PERSON:
            return [self.keys[key]] if key in self.keys else []
        known = [self.keys.get(each) for each in _lineage(key)]
        return [self.root, *(each for each in known if each is not None)]

    def cdf(self, tools: tuple[str, ...]) -> tuple[Floats, bool]:
        if tools not in self.cdfs:
            chains = [self.chain(key) for key in tools[:MAX_CALLS] or (PERSON,)]
            cdf: Floats = np.prod([_cumulative(_mass(chain)) for chain in chains], axis=0)
            trained = all(chain and chain[0].total >= TRAINED for chain in chains)
            if len(self.cdfs) >= MAX_KEYS:
                self.cdfs.clear()
            self.cdfs[tools] = cdf, trained
        return self.cdfs[tools]

    def learn(self, key: str, sample: Floats) -> None:
        self.cdfs.clear()
        for each in _lineage(key):
            self.keys.setdefault(each, Histogram()).add(sample)
            self.keys.move_to_end(each)
        if key != PERSON:
            self.root.add(sample)
        while len(self.keys) > MAX_KEYS:
            self.keys.popitem(last=False)

    def judge(self, error: float) -> None:
        self.errors.append(error)
        self.spread = median(self.errors)
        known = len(self.errors) / (len(self.errors) + HINTS_TO_TRUST)
        self.trust = MOST_TRUST * known * max(0.0, 1 - self.spread / WORST_ERROR)


class GapModel:
    """Learns gaps and tells their distributions. Reading changes nothing."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()  # last learned last
        self._new = _Namespace()  # stands for those that have learned nothing

    def __len__(self) -> int:
        """Return how many keys are known."""
        return sum(len(each.keys) for each in self._namespaces.values())

    def learn(self, namespace: str, tools: tuple[str, ...], gap_s: float) -> None:
        """Take note of one gap; one that is not a number is ignored."""
        if math.isnan(gap_s):
            return
        known = self._touch(namespace)
        keys = tools[:MAX_CALLS] or (PERSON,)
        place = int(np.clip(np.searchsorted(EDGES, gap_s, side="right") - 1, 0, BINS))
        for key, sample in zip(
            keys, _split([_mass(known.chain(k)) for k in keys], place), strict=True
        ):
            known.learn(key, sample)

    def learn_hint(self, namespace: str, expected_s: float, actual_s: float) -> None:
        """Take note of how right a hint was."""
        if usable(expected_s) and not math.isnan(actual_s):
            wrong = abs(math.log(_bounded(expected_s) / _bounded(actual_s)))
            self._touch(namespace).judge(wrong)

    def cdf(self, namespace: str, tools: tuple[str, ...]) -> tuple[Floats, bool]:
        """Return the gap's distribution (BINS + 1,), and whether enough samples are behind it."""
        return (self._namespaces.get(namespace) or self._new).cdf(tools)

    def trust(self, namespace: str) -> tuple[float, float]:
        """Return how far to believe hints, 0 .. 0.95, and their typical error in log units."""
        known = self._namespaces.get(namespace) or self._new
        return known.trust, known.spread

    def _touch(self, namespace: str) -> _Namespace:
        known = self._namespaces.setdefault(namespace, _Namespace())
        self._namespaces.move_to_end(namespace)
        while len(self._namespaces) > MAX_NAMESPACES:
            self._namespaces.popitem(last=False)
        return known


def usable(expected_s: float | None) -> bool:
    """Return whether a hint can mean anything."""
    return expected_s is not None and math.isfinite(expected_s) and expected_s >= 0


def _bounded(seconds: float) -> float:
    return min(max(seconds, SHORTEST_S), LONGEST_S)


def _lineage(key: str) -> list[str]:
    """Return a tool key's name and, if it says more than that, the key itself."""
    name = key.split(":", 1)[0]
    return [key] if name == key or not name else [name, key]


def _mass(chain: list[Histogram]) -> Floats:
    """Return the share of each bin, shrunk from the most general histogram on."""
    mass = PRIOR
    for each in chain:
        mass = (each.mass + SHRINK * mass) / (each.total + SHRINK)
    return mass


def _cumulative(mass: Floats) -> Floats:
    """Return P(gap <= EDGES[i]) for shares of bins along the last axis."""
    cdf: Floats = np.zeros(mass.shape)
    np.cumsum(mass[..., :-1], axis=-1, out=cdf[..., 1:])
    return np.minimum(cdf, 1.0)


def _split(beliefs: list[Floats], place: int) -> list[Floats]:
    """Return what a gap that ended in bin `place` says of each of its parallel calls.

    One of them, nobody knows which, took that long; the others took at most as long. Each call's
    sample weighs both by what was believed of it before (one step of expectation maximisation).
    """
    shorter = [np.where(np.arange(BINS + 1) <= place, mass, 0.0) for mass in beliefs]
    shorter = [mass / mass.sum() for mass in shorter]
    slowest = np.array([mass[place] for mass in shorter])
    slowest /= slowest.sum()
    exactly: Floats = np.zeros(BINS + 1)
    exactly[place] = 1.0
    return [
        share * exactly + (1 - share) * mass for share, mass in zip(slowest, shorter, strict=True)
    ]
