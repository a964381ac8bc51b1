"""Devices whose invariants are verified after each copy and at the end of the test."""

import pytest
from kv_chains import CheckedDevice

from agentserve.kv.chains import KvCache, KvShape
from agentserve.kv.policy import make_policy


@pytest.fixture
def device():
    """Return what makes devices with blocks of 4 tokens."""
    made = []

    def make(num_blocks=16, host=32, policy="lru+host", **options) -> CheckedDevice:
        kv = KvCache(KvShape("m", num_blocks, 4, host), make_policy(policy))
        made.append(CheckedDevice(kv, **options))
        return made[-1]

    yield make
    for d in made:
        d.kv.check()
        d.land_all()
        d.kv.check()
