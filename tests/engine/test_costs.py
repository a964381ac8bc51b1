"""What the engine's own measurements say of its costs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.engine.costs import FIRST_PREFILL, CostModel
from agentserve.engine.plan import Row, Traffic

BASE, TOKEN, PAIR = 0.004, 6e-5, 4e-10


def model():
    return CostModel(token_bytes=131_072, pool_tokens=200_000)


def takes(rows):
    return sum(
        (TOKEN * r.count + PAIR * r.count * (r.start + r.count / 2) for r in rows), start=BASE
    )


def steps(count):
    """Prefills of many lengths after many others, beside a few decodes."""
    for n in range(count):
        prefill = Row(0, (n * 7919) % 90_000, 16 + (n * 211) % 2000, True)
        yield [prefill, *(Row(1 + d, 1000 * d, 1, True) for d in range(n % 4))]


def test_the_fit_finds_what_prefill_takes():
    m = model()
    for rows in steps(200):
        m.step(rows, takes(rows))
    costs = m.costs()
    assert costs.prefill_base_s == pytest.approx(BASE, rel=0.05)
    assert costs.prefill_token_s == pytest.approx(TOKEN, rel=0.02)
    assert costs.prefill_pair_s == pytest.approx(PAIR, rel=0.02)
    long = Row(0, 0, 80_000, True)
    assert costs.prefill_s(80_000) == pytest.approx(takes([long]), rel=0.02)


def test_a_few_steps_are_enough_to_be_near_and_stalls_do_not_matter():
    m = model()
    for n, rows in enumerate(steps(24)):
        m.step(rows, takes(rows) + (30.0 if n in (0, 17) else 0.0))
    assert m.costs().prefill_s(2000, 20_000) == pytest.approx(
        takes([Row(0, 20_000, 2000, True)]), rel=0.1
    )


def test_steps_of_one_length_do_not_upset_what_they_cannot_show():
    m = model()
    for _ in range(100):
        m.step([Row(0, 0, 512, True)], 0.1)
    costs = m.costs()
    assert costs.prefill_s(512) == pytest.approx(0.1, rel=0.01)
    assert 0.05 < costs.prefill_s(1024) < 0.5


def test_a_slower_machine_is_noticed():
    m = model()
    for factor in (1, 3):
        for rows in steps(600):
            m.step(rows, takes(rows) * factor)
    assert m.costs().prefill_token_s == pytest.approx(3 * TOKEN, rel=0.05)


def test_decode_steps_are_not_taken_for_prefill():
    m = model()
    for _ in range(200):
        m.step([Row(0, 5000, 1, True)], 0.02)
    costs = m.costs()
    assert (costs.prefill_base_s, costs.prefill_token_s, costs.prefill_pair_s) == FIRST_PREFILL


def test_a_reload_takes_what_the_copier_needed_newest_first():
    m = model()
    default = m.costs().reload_s
    m.traffic(Traffic(saved_bytes=10**9, saved_s=0.1))
    assert m.costs().reload_s == pytest.approx(131_072 / 1e10) != default
    m.traffic(Traffic(10**9, 0.1, loaded_bytes=5 * 10**9, loaded_s=0.2))
    assert m.costs().reload_s == pytest.approx(131_072 / 2.5e10)
    for n in range(1, 101):  # now ten times slower
        m.traffic(Traffic(10**9, 0.1, 5 * 10**9 + n * 10**9, 0.2 + n * 0.4))
    assert m.costs().reload_s == pytest.approx(131_072 / 2.5e9, rel=0.01)


def test_a_copier_that_started_anew_counts_from_nothing():
    m = model()
    m.traffic(Traffic(loaded_bytes=10**10, loaded_s=1.0))
    for n in range(1, 100):
        m.traffic(Traffic(loaded_bytes=n * 10**8, loaded_s=n * 0.1))
    assert m.costs().reload_s == pytest.approx(131_072 / 1e9, rel=0.01)


def test_room_has_a_price_from_80_percent_and_the_full_one_from_95():
    m = model()
    prices = []
    for used in (0, 160_000, 175_000, 190_000, 200_000):
        m.pool(used)
        prices.append(m.costs().pressure)
    assert prices == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    m.pool(150_000, demanded=40_000)
    assert m.costs().pressure == pytest.approx(1.0)


def test_room_is_free_while_those_who_wait_fit_into_what_is_spare():
    m = model()
    m.pool(200_000, demanded=30_000, spare=30_000)
    assert m.costs().pressure == 0.0
    m.pool(200_000, demanded=30_001, spare=30_000)
    assert m.costs().pressure == 1.0


def test_the_delay_is_what_turns_waited_longer_because_their_kv_was_gone():
    m = model()
    for _ in range(100):
        m.queued(5.0, resident=True)
    assert m.costs().delay_s == 0.0  # nothing to compare with
    for _ in range(100):
        m.queued(7.5, resident=False)
    assert m.costs().delay_s == pytest.approx(2.5)
    for _ in range(64):
        m.queued(9.0, resident=True)
    assert m.costs().delay_s == 0.0  # never negative


anything = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(anything, st.integers(0, 3000), st.integers(0, 10**12), anything, anything),
        max_size=80,
    )
)
def test_costs_are_finite_and_not_negative_whatever_is_reported(reports):
    m = model()
    for seconds, count, moved, busy, waited in reports:
        m.step([Row(0, 7 * count, count, True)], seconds)
        m.traffic(Traffic(moved, busy, moved // 2, busy))
        m.queued(waited, resident=count % 2 == 0)
        m.pool(moved, demanded=count)
    costs = m.costs()
    values = [
        costs.reload_s,
        costs.prefill_base_s,
        costs.prefill_token_s,
        costs.prefill_pair_s,
        costs.pressure,
        costs.delay_s,
    ]
    assert all(value >= 0 and not math.isnan(value) for value in values)
    assert costs.pressure <= 1.0
    assert costs.prefill_s(1000, 1000) > 0
