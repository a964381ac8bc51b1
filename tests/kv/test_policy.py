"""Which idle sequence loses its device blocks first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.kv.policy import POLICIES, Costs, Idle, make_policy

COSTS = Costs(
    reload_s=2.5e-6,
    prefill_base_s=0.005,
    prefill_token_s=6e-5,
    prefill_pair_s=4e-10,
    pool_tokens=200_000,
    pressure=1.0,
    delay_s=0.0,
)
NOW = 10_000.0
KEEPING = [name for name in POLICIES if name != "none"]

idles = st.builds(
    Idle,
    namespace=st.sampled_from("ab"),
    since=st.floats(0.0, NOW),
    tools=st.sampled_from([(), ("read",), ("bash:make",), ("read", "bash:ls"), ("bash:ls",) * 3]),
    expected_s=st.none() | st.floats(allow_nan=True, allow_infinity=True),
    hinted_at=st.floats(0.0, NOW),
    kv=st.sampled_from(["auto", "device", "host", "drop"]),
    tokens=st.integers(0, 150_000),
    clean=st.booleans(),
    queued=st.integers(0, 3),
    promoted=st.booleans(),
)


def idle(since=NOW - 10, **fields):
    return Idle(namespace="a", since=since, tokens=20_000, **fields)


def test_there_are_four_policies_and_an_unknown_one_is_refused_by_name():
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)
    assert len(POLICIES) == 4
    with pytest.raises(ValueError, match=r"'mru'.*none, device-lru, lru\+host, tool-aware"):
        make_policy("mru")


def test_what_a_policy_keeps_and_where_follows_from_its_name():
    kept = {name: (p.keeps, p.uses_host) for name in POLICIES for p in [make_policy(name)]}
    assert kept == {
        "none": (False, False),
        "device-lru": (True, False),
        "lru+host": (True, True),
        "tool-aware": (True, True),
    }


@pytest.mark.parametrize("name", KEEPING)
def test_the_least_recently_used_goes_first_when_nothing_else_is_known(name):
    several = [idle(since=since) for since in (50.0, 3.0, 9_000.0, 9_999.9)]
    order = make_policy(name).order(several, NOW, COSTS)
    assert [each.since for each in order] == [3.0, 50.0, 9_000.0, 9_999.9]


@pytest.mark.parametrize("name", KEEPING)
def test_hints_and_the_queue_come_before_use(name):
    expected = [
        idle(kv="drop"),
        idle(kv="host"),
        idle(kv="host", clean=False),
        idle(),
        idle(clean=False),
        idle(kv="device"),
        idle(kv="device", clean=False),
        idle(promoted=True),
        idle(queued=2, kv="drop"),
        idle(queued=1),
    ]
    for each, since in zip(expected, range(9_990, 9_980, -1), strict=True):
        each.since = float(since)  # by use alone the order would be the reverse
    assert make_policy(name).order(reversed(expected), NOW, COSTS) == expected


@pytest.mark.parametrize("name", KEEPING)
@given(several=st.lists(idles, max_size=20), pressure=st.floats(0.0, 1.0), data=st.data())
def test_an_order_is_a_permutation_and_the_same_for_the_same_facts(name, several, pressure, data):
    policy = make_policy(name)
    for each in several[::2]:
        policy.learn(each, data.draw(st.floats(0.0, 2 * NOW)))
    costs = Costs(2.5e-6, 0.005, 6e-5, 4e-10, 200_000, pressure, 0.1)
    order = policy.order(several, NOW, costs)
    assert sorted(map(id, order)) == sorted(map(id, several))
    assert policy.order(iter(several), NOW, costs) == order
    assert policy.order(order, NOW, costs) == order
