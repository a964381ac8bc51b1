import numpy as np
import pytest
from agentserve_kernels.claims import claim, share
from agentserve_kernels.prefixes import MEMBERS, TOKENS, shared_prefixes
from hypothesis import given
from hypothesis import strategies as st
from numba import get_num_threads, njit, prange

BLOCK = 32


@njit(parallel=True)
def claim_all(counter, owners, workers):
    for worker in prange(workers):
        while True:
            number = claim(counter)
            if number >= owners.size:
                break
            owners[number] += worker + 1


def test_every_task_is_claimed_once():
    for _ in range(20):
        owners = np.zeros(5000, np.int64)
        claim_all(np.zeros(1, np.int64), owners, get_num_threads())
        assert set(owners.tolist()) <= set(range(1, get_num_threads() + 1))


@pytest.mark.parametrize("count", [1, 2, 5, 36, 192, 3072])
@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_shares_follow_each_other_and_shrink(count, least, threads):
    runs, end = [], 0
    while end < count:
        first, end_of_run = share(len(runs), count, least, threads)
        assert first == end
        end = end_of_run
        runs.append(end - first)
    assert end == count
    assert share(len(runs), count, least, threads) == (count, count)
    assert min(runs[:-1], default=least) >= least
    assert max(runs) <= max(least, count // (2 * threads))


@given(st.data())
def test_rows_of_a_prefix_share_its_blocks_and_no_row_comes_twice(data):
    trunks = [list(range(100 * n, 100 * n + 40)) for n in range(3)]
    tables, lengths = [], []
    for row in range(data.draw(st.integers(0, 20))):
        kept = data.draw(st.integers(0, 40))
        own = [1000 + 100 * row + n for n in range(40 - kept)]
        tables.append(data.draw(st.sampled_from(trunks))[:kept] + own)
        lengths.append(data.draw(st.integers(1, 40 * BLOCK)))
    rows, lengths = np.array(tables, np.int32).reshape(-1, 40), np.array(lengths, np.int64)
    seen = []
    for members, tokens in shared_prefixes(rows, lengths, BLOCK):
        assert len(members) >= MEMBERS
        assert tokens >= TOKENS
        assert tokens % BLOCK == 0
        assert (rows[members, : tokens // BLOCK] == rows[members[0], : tokens // BLOCK]).all()
        assert (lengths[members] > tokens).all(), "each has its last token for itself"
        seen += members.tolist()
    assert len(seen) == len(set(seen))


def test_the_prefix_that_saves_most_is_taken_first():
    rows = np.arange(6 * 40, dtype=np.int32).reshape(6, 40)
    rows[1:, :10] = rows[0, :10]
    rows[1:5, :30] = rows[0, :30]
    lengths = np.full(6, 40 * BLOCK)
    ((members, tokens),) = shared_prefixes(rows, lengths, BLOCK)
    assert (members.tolist(), tokens) == ([0, 1, 2, 3, 4], 30 * BLOCK)
    ((members, tokens),) = shared_prefixes(rows[[0, 1, 2, 5, 5]], lengths[:5], BLOCK)
    assert (members.tolist(), tokens) == ([0, 1, 2, 3, 4], 10 * BLOCK)
