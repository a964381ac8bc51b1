"""The simulation at scale: its cost model against the floors, and a tiny cell of it."""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from agentserve.engine.plan import Row

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The modules beside the benchmark can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.startswith("scale_")]:
        del sys.modules[name]


def prefill_s(machine, tokens):
    starts = range(0, tokens, machine.pass_tokens)
    rows = [Row(0, at, min(machine.pass_tokens, tokens - at), True) for at in starts]
    return sum(machine.step_s([row]) for row in rows)


def test_the_cost_model_keeps_to_the_floors():
    from scale_model import Machine

    machine = Machine()
    # 80k tokens: 1.28 + 1.68 PFLOP, 3.0 s at the peak of 989 TFLOPS, 5.4 s at 55% of it
    assert 5.4 < prefill_s(machine, 80_000) < 5.5
    # a decode step reads 16.1 GB of weights and 10.5 GB of KV for each session of 80k
    step = machine.step_s([Row(slot, 79_999, 1, True) for slot in range(10)])
    assert step == pytest.approx(0.0005 + (16.1e9 + 10 * 80_000 * 131_072) / 3.84e12)
    assert machine.step_s([]) == 0


def synthetic(seed):
    """Conversations that grow by small steps and now and then start over from a shared prefix."""
    from scale_workload import Request

    rng = random.Random(seed)
    conversations = []
    for _ in range(6):
        requests, log = [], 0
        for turn in range(rng.randint(3, 12)):
            kept = log if rng.random() < 0.9 else log // 3
            new, output = rng.randint(20, 400 if turn else 2000), rng.randint(1, 30)
            requests.append(Request(kept, new, output, rng.expovariate(1.0), rng.random() < 0.9))
            log = kept + new + output
        conversations.append(tuple(requests))
    return conversations


def tiny(policy, host_blocks, **changes):
    from scale_loop import Cell, Simulation
    from scale_model import Machine

    host_bytes = host_blocks * 64 * 131_072
    sizes = {
        "device_tokens": 8_192,
        "block_tokens": 64,
        "start_s": 0.5,
        "settle_s": 2.0,
        "window_s": 40.0,
    }
    cell = Cell(policy, 6, host_bytes, seed=3, **sizes | changes)
    return Simulation(cell, synthetic(1), Machine(overhead_s=0.05)).run()  # few, long steps


def test_a_device_that_holds_all_computes_each_token_once():
    measured = tiny("device-lru", 0, device_tokens=65_536)
    assert measured.turns > 40
    assert measured.recomputed_tokens <= 8  # at most the last token of a prompt that is all known
    assert measured.preemptions == 0


def test_a_device_that_is_too_small_computes_tokens_again():
    measured = tiny("device-lru", 0, check_invariants=True)
    assert measured.turns > 20
    assert measured.recomputed_tokens > measured.new_tokens
    assert measured.longest_wait_s >= max(measured.ttft_s)
    assert measured.loaded_bytes == measured.saved_bytes == 0


def test_with_a_host_that_holds_all_next_to_nothing_is_computed_again():
    measured = tiny("lru+host", 1000)
    assert measured.recomputed_tokens < 0.01 * measured.new_tokens
    assert measured.loaded_bytes > 0
    assert measured.saved_bytes >= (measured.new_tokens - measured.recomputed_tokens) * 131_072 / 2
    assert measured.output_tokens > tiny("device-lru", 0).output_tokens


def test_a_host_that_is_too_small_says_what_it_lost():
    measured = tiny("tool-aware", 64, check_invariants=True)
    assert measured.loaded_bytes > 0
    assert set(measured.lost) == {"host_full"}
    assert measured.turns > 20


def test_the_same_cell_gives_the_same_result():
    assert tiny("device-lru", 0, window_s=5.0) == tiny("device-lru", 0, window_s=5.0)


def test_logged_requests_become_what_they_keep_and_add(tmp_path):
    from scale_workload import Request, load

    rows = [
        {"type": "n", "in": 200, "out": 10, "hash_ids": [1, 2, 3, 4], "stop": "tool_use"},
        {"type": "subagent", "requests": []},
        {"type": "n", "in": 300, "out": 0, "hash_ids": [1, 2, 3, 5, 6], "stop": "end_turn"}
        | {"think_time": 7.0},
        {"type": "n", "in": 250, "out": 5, "hash_ids": [1, 2, 9, 9], "stop": "end_turn"}
        | {"think_time": 9e9},
    ]
    path = tmp_path / "traces.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"requests": rows}) + "\n")
        file.write(json.dumps({"requests": [rows[0] | {"in": 5000}]}) + "\n")
    assert load(path, max_context=1000, max_wait_s=300.0) == [
        (
            Request(0, 200, 10, 0.0, False),
            Request(210, 90, 1, 7.0, True),
            Request(128, 122, 5, 300.0, False),
        )
    ]
