"""INV-06: whatever arrives in whatever order, some step runs or some turn ends."""

import pytest
from counts import COUNTS
from small_worlds import check_ends, explore, overload, small_world

from agentserve.kv.blocks import NoRoom
from agentserve.kv.chains import KvCache

DEPTH = {0: 8, 1: 7}  # moves, by the runner's depth; `make progress DEPTH=10` goes further
LEAST = {0: 1500, 1: 800}  # states
OVERLOADS = 200  # `make progress` runs 10,000


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("host_blocks", [0, 2, 4])
def test_every_order_of_two_sessions_on_four_blocks_makes_progress(host_blocks, ahead):
    counts = explore(host_blocks, DEPTH[ahead], ahead)
    COUNTS["small-scope states"] += counts["states"]
    assert counts["states"] > LEAST[ahead]


def test_random_overloads_always_finish_and_give_the_right_tokens():
    turns = sum(overload(seed) for seed in range(OVERLOADS))
    COUNTS["random overloads"] += OVERLOADS
    assert turns > 5 * OVERLOADS


def test_an_engine_that_never_finds_room_is_found_out(monkeypatch):
    monkeypatch.setattr(KvCache, "acquire", lambda *_, **__: NoRoom(1, 0))
    stuck = small_world(0)
    for number in (1, 2):
        stuck.submit(number, [number] * 3)
        with pytest.raises(AssertionError, match="INV-06"):
            check_ends(stuck, set())
