"""What is learned of gaps: distributions, ages, parents, parallel calls, hints, bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.kv import gaps
from agentserve.kv.gaps import EDGES, GapModel, Histogram, at, hazard, hinted, residual

durations = st.floats(0.0, 1e5) | st.sampled_from([0.0, float("inf")])
keys = st.sampled_from(
    [(), ("read",), ("bash:make",), ("bash:ls", "read"), ("bash:ls",) * 3, (":",)]
)


def learned(samples, tools=("tool",), namespace="a"):
    model = GapModel()
    for gap in samples:
        model.learn(namespace, tools, gap)
    return model


def row(model, tools=("tool",), namespace="a"):
    return model.cdf(namespace, tools)[0][None]


def within(cdf, seconds):
    return float(at(cdf, np.array([seconds]))[0])


def hazards(cdf, ages):
    return hazard(np.repeat(cdf, len(ages), axis=0), np.array(ages))


def heavy_tailed(count=400):
    """Quantiles of a Lomax distribution with shape 1: its hazard is 1 / (1 + age)."""
    ranks = (np.arange(count) * 0.618034) % 1.0
    return ranks / (1 - ranks)


@given(st.lists(durations, max_size=60))
def test_a_histogram_holds_the_weight_of_its_samples(samples):
    histogram = Histogram()
    for gap in samples:
        sample = np.zeros(gaps.BINS + 1)
        sample[int(min(gap, gaps.BINS))] = 1.0
        histogram.add(sample)
    assert histogram.mass.min() >= 0
    assert histogram.mass.sum() == pytest.approx(histogram.total)
    assert histogram.total == pytest.approx(sum(gaps.DECAY**n for n in range(len(samples))))


@given(st.lists(st.tuples(keys, durations), max_size=40), keys)
def test_a_distribution_rises_from_0_and_stays_below_1_whatever_was_learned(samples, tools):
    model = GapModel()
    for key, gap in samples:
        model.learn("a", key, gap)
    cdf, _ = model.cdf("a", tools)
    assert cdf[0] == 0.0
    assert cdf[-1] < 1.0
    assert (np.diff(cdf) >= 0).all()
    ages = np.array([0.0, 0.005, 0.3, 7.0, 900.0, 3599.0, 3600.0, 1e6])
    table = np.repeat(cdf[None], len(ages), axis=0)
    for ahead in (0.0, 0.1, 10.0, 1e5):
        chance = residual(table, ages, np.full(len(ages), ahead))
        assert ((chance >= 0) & (chance <= 1 + 1e-12)).all()
    assert np.isfinite(hazard(table, ages)).all()
    assert (hazard(table, ages) >= 0).all()


def test_samples_move_the_distribution_to_where_they_are():
    cdf = row(learned([2.0] * 100))
    assert within(cdf, 1.0) < 0.2 < 0.8 < within(cdf, 2.5)


def test_new_samples_outweigh_old_ones():
    cdf = row(learned([1.0] * 1000 + [100.0] * 1000))
    assert within(cdf, 10.0) < 0.25


def test_the_hazard_falls_with_age_for_a_heavy_tail():
    cdf = row(learned(heavy_tailed()))
    ages = [0.25 * 2**n for n in range(9)]
    values = hazards(cdf, ages)
    assert (np.diff(values) < 0).all()
    assert values[3] == pytest.approx(1 / 3, rel=0.35)  # age 2; the mean over the next second


@given(st.floats(0.0, 1e5), st.floats(1.01, 2.0))
def test_the_hazard_of_what_nothing_is_known_of_falls_with_age(age, factor):
    younger, older = hazards(row(GapModel()), [age, age * factor + 0.01])
    assert younger > older


def test_the_hazard_rises_until_a_tool_that_always_takes_as_long_must_return():
    cdf = row(learned([10.0] * 200))
    early, due, late = hazards(cdf, [1.0, 8.5, 40.0])
    assert early < due / 5
    assert late < due / 5


def test_waiting_on_makes_a_long_rest_more_likely_where_tails_are_heavy():
    cdf = np.repeat(row(learned(heavy_tailed())), 4, axis=0)
    rest = residual(cdf, np.array([0.0, 2.0, 20.0, 200.0]), np.full(4, 5.0))
    assert (np.diff(rest) < 0).all()


def test_a_new_key_is_believed_like_its_name_and_a_new_name_like_the_namespace():
    model = learned([30.0] * 200, ("bash:make",))
    for gap in [0.1] * 200:
        model.learn("a", ("read",), gap)
    make, fresh = row(model, ("bash:make",)), row(model, ("bash:cargo",))
    other = row(model, ("search",))
    assert (
        within(make, 5.0)
        < within(fresh, 5.0)
        < within(other, 5.0)
        < within(row(model, ("read",)), 5.0)
    )


def test_few_samples_of_a_key_say_little_against_its_name():
    model = learned([30.0] * 200, ("bash:make",))
    model.learn("a", ("bash:ls",), 0.05)
    assert within(row(model, ("bash:ls",)), 5.0) < 0.3
    for gap in [0.05] * 200:
        model.learn("a", ("bash:ls",), gap)
    assert within(row(model, ("bash:ls",)), 5.0) > 0.8


def test_people_and_tools_do_not_teach_each_other():
    model = learned([300.0] * 100, ())
    assert not model.cdf("a", ("read",))[1]
    assert model.cdf("a", ())[1]
    for gap in [0.1] * 100:
        model.learn("a", ("read",), gap)
    assert within(row(model, ()), 10.0) < 0.2


def test_namespaces_do_not_teach_each_other():
    model = learned([3.0] * 100)
    flat = row(GapModel())
    assert np.array_equal(row(model, namespace="b"), flat)
    assert model.cdf("a", ("tool",))[1]
    assert not model.cdf("b", ("tool",))[1]


def test_parallel_calls_take_as_long_as_the_slowest():
    model = learned([1.0] * 200, ("fast",))
    for gap in [20.0] * 200:
        model.learn("a", ("slow",), gap)
    both = row(model, ("fast", "slow"))
    assert within(both, 10.0) <= within(row(model, ("slow",)), 10.0)
    assert within(both, 25.0) > 0.7


def test_the_gap_of_parallel_calls_is_put_down_to_the_slow_one():
    model = learned([0.5] * 50, ("fast",))
    for gap in [20.0] * 50:
        model.learn("a", ("slow",), gap)
    for _ in range(100):
        model.learn("a", ("fast", "slow"), 20.0)
    assert within(row(model, ("fast",)), 1.0) > 0.6


def test_equal_calls_in_parallel_teach_what_one_of_them_takes():
    """The longest of 4 has median 2.6 where a single one has 1; learning must not mix them up."""
    ranks = (np.arange(2000) * 0.618034) % 1.0
    longest = -np.log(1 - ranks ** (1 / 4))  # of four exponential durations with mean 1
    single = row(learned(longest, ("t",) * 4), ("t",))
    assert within(single, 0.69) == pytest.approx(0.5, abs=0.12)
    assert within(row(learned(longest), ("tool",)), 0.69) < 0.15


def test_hints_are_believed_as_far_as_they_have_proved_right():
    model = GapModel()
    assert model.trust("a")[0] == 0.0
    for n in range(30):
        model.learn_hint("a", 5.0, 5.0 + n % 2)
        model.learn_hint("b", 5.0, 20.0)
        model.learn_hint("c", 5.0, 7.5)
    trust = {name: model.trust(name)[0] for name in "abc"}
    assert trust["a"] > 0.7 > trust["c"] > 0.3
    assert trust["b"] == 0.0


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True))
def test_a_senseless_hint_does_no_harm(hint, actual):
    model = GapModel()
    model.learn_hint("a", hint, actual)
    trust, spread = model.trust("a")
    assert 0 <= trust < 1
    assert spread >= 0


def test_a_hint_stands_for_gaps_around_it():
    cdf = hinted(np.array([0.0, 5.0, 1e9]), np.full(3, 0.3))
    assert (np.diff(cdf, axis=1) >= 0).all()
    assert at(cdf, np.array([0.1, 5.0, 3000.0])) == pytest.approx([1.0, 0.5, 0.2], abs=0.25)


def test_keys_and_namespaces_are_bounded_and_the_oldest_go():
    model = GapModel()
    for n in range(2 * gaps.MAX_KEYS):
        model.learn("a", (f"bash:{n}",), 1.0)
    assert len(model) == gaps.MAX_KEYS
    for n in range(2 * gaps.MAX_NAMESPACES):
        model.learn(f"n{n}", ("t",), 1.0)
    assert len(model) == gaps.MAX_NAMESPACES
    assert not model.cdf("a", ("bash:1",))[1]


def test_reading_changes_nothing():
    model = learned([1.0])
    model.cdf("new", ("x:y",))
    model.trust("new")
    assert len(model) == 1


def test_the_bins_cover_10_ms_to_an_hour():
    assert len(EDGES) == 65
    assert EDGES[1] == pytest.approx(0.01 * 360_000 ** (1 / 64))
    assert EDGES[-1] == pytest.approx(3600.0)
