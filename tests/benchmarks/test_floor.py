"""The floor's arithmetic on cases that were computed by hand."""

import sys
from pathlib import Path

import msgspec
import pytest

from agentserve.model.spec import parse_spec
from agentserve.replay.generator import Workload

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# 2 layers, hidden 4, inner 8, 2 query heads and 1 KV head of 2, 10 words.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 1000,
}
SPEC = parse_spec(msgspec.json.encode(CONFIG))
# A layer: qkv 4 x 8, output 4 x 4, three of 4 x 8. The head: 4 x 10.
LAYER, KEYS, HEAD = 32 + 16 + 96, 16, 40
WEIGHTS = 2 * (2 * LAYER + HEAD)  # bytes
TOKEN = 2 * 2 * 2 * 2  # bytes of KV: layers, K and V, dimensions, bfloat16


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The modules beside the benchmark can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.startswith("floor")]:
        del sys.modules[name]


def rates(memory, flops):
    from floor_rates import Product, Rates

    return Rates({"read": memory}, [Product("a", 1, flops, 1.0), Product("b", 9, 1.0, 1.0)], [])


def test_a_decode_pass_reads_all_weights_and_the_cached_kv():
    from floor import pass_cost

    cost = pass_cost(SPEC, 1, 7)
    assert cost.weight_bytes == WEIGHTS
    assert cost.kv_bytes == 7 * TOKEN
    assert cost.product_flops == 2 * (2 * LAYER + HEAD)
    keys, layers, heads, dim = 8, 2, 2, 2
    assert cost.attention_flops == layers * (2 * 2) * (heads * dim) * keys  # two products


def test_a_prefill_pass_gives_the_last_layer_only_what_is_asked_for():
    from floor import pass_cost

    cost = pass_cost(SPEC, 3, 5)
    assert cost.weight_bytes == WEIGHTS
    assert cost.kv_bytes == 5 * TOKEN
    assert cost.product_flops == 2 * (3 * (LAYER + KEYS) + LAYER - KEYS + HEAD)
    seen = 6 + 7 + 8
    assert cost.attention_flops == 4 * 2 * 2 * (seen + 8)


def test_a_prefill_in_two_passes_does_the_same_attention():
    from floor import pass_cost

    whole = pass_cost(SPEC, 9, 5)
    parts = pass_cost(SPEC, 4, 5, sampled=0) + pass_cost(SPEC, 5, 9)
    assert parts.attention_flops == whole.attention_flops
    assert parts.product_flops == whole.product_flops
    assert parts.weight_bytes == 2 * whole.weight_bytes


def test_a_generated_workload_is_counted_turn_by_turn():
    from floor import TurnWork, sessions_of

    workload = Workload(sessions=2, turns=3, prompt=100, new=10, output=20, gap=0.0)
    first, second = sessions_of(workload)
    assert first == [TurnWork(110, 0, 20), TurnWork(11, 129, 20), TurnWork(11, 159, 20)]
    assert second == [TurnWork(10, 100, 20), TurnWork(11, 129, 20), TurnWork(11, 159, 20)]


def test_gaps_are_those_of_the_workload_and_none_follows_the_last_turn():
    from floor import sessions_of

    from agentserve.replay.generator import generate

    workload = Workload(sessions=1, turns=4, gap=2.0, seed=3)
    told = [turn.tool_seconds for turn in generate(workload)[0].turns[:-1]]
    assert min(told) > 0.0
    assert [turn.gap_s for turn in sessions_of(workload)[0]] == [*told, 0.0]


def test_one_session_takes_the_sum_of_its_passes_and_its_gaps():
    from floor import TurnWork, floor_of_sessions

    # Memory decides: a byte a second. The gap after the last turn delays nobody.
    turns = [TurnWork(4, 0, 2, gap_s=50.0), TurnWork(3, 5, 1, gap_s=1000.0)]
    floor = floor_of_sessions([turns], SPEC, rates(1.0, 1e12))
    assert floor.session_prefill_s == pytest.approx(2 * WEIGHTS + 5 * TOKEN)
    assert floor.session_decode_s == pytest.approx(WEIGHTS + 4 * TOKEN)
    assert floor.session_gaps_s == 50.0
    assert floor.seconds == pytest.approx(3 * WEIGHTS + 9 * TOKEN + 50.0)
    assert floor.ttft_p50_s == pytest.approx(WEIGHTS + 2.5 * TOKEN)
    assert floor.turn_p50_s == pytest.approx((2 * WEIGHTS + 4 * TOKEN + WEIGHTS + 5 * TOKEN) / 2)


def test_each_pass_takes_the_longer_of_its_bytes_and_its_flops():
    from floor import TurnWork, floor_of_sessions, pass_cost

    prefill, decode = pass_cost(SPEC, 40, 0), pass_cost(SPEC, 1, 40)
    flops = [cost.product_flops + cost.attention_flops for cost in (prefill, decode)]
    rate = flops[0] / (3 * WEIGHTS)  # prefill takes three times as long as its bytes
    floor = floor_of_sessions([[TurnWork(40, 0, 2)]], SPEC, rates(1.0, rate))
    assert floor.session_prefill_s == pytest.approx(3 * WEIGHTS)
    assert flops[1] / rate < WEIGHTS
    assert floor.session_decode_s == pytest.approx(WEIGHTS + 40 * TOKEN)


def test_sessions_share_weights_and_the_prompt_and_nothing_else():
    from floor import TurnWork, floor_of_sessions

    one = [TurnWork(12, 0, 2), TurnWork(3, 13, 2)]  # the first 10 tokens are the shared prompt
    other = [TurnWork(2, 10, 2), TurnWork(3, 13, 2)]
    floor = floor_of_sessions([one, other, other], SPEC, rates(1.0, 1e12), shared=10)
    assert floor.work.weight_bytes == 4 * WEIGHTS
    private = 3 * (2 + 3 + 6)  # beyond the prompt: one's first pass reads nothing at all
    assert floor.work.kv_bytes == (private + 4 * 10) * TOKEN
    assert floor.seconds == floor.work_s > floor.session_s
    alone = floor_of_sessions([one], SPEC, rates(1.0, 1e12), shared=10)
    assert floor.work.product_flops > alone.work.product_flops


def test_many_sessions_that_mostly_wait_end_with_the_one_that_waits_longest():
    from floor import TurnWork, floor_of_sessions

    sessions = [[TurnWork(2, 0, 1, gap_s=gap), TurnWork(2, 2, 1)] for gap in (5e4, 9e4, 7e4)]
    floor = floor_of_sessions(sessions, SPEC, rates(1.0, 1e12))
    assert floor.session_gaps_s == 9e4
    assert floor.seconds == floor.session_s > floor.work_s


def test_the_best_method_gives_the_rates():
    from floor_rates import Attention, Product, Rates

    measured = Rates(
        {"x": 3.0, "y": 4.0},
        [Product("a", 1, 10.0, 6.0), Product("b", 512, 90.0, 1.0)],
        [Attention("c", 1, 1, 99, flops_per_s=20.0, kv_bytes_per_s=5.0)],
    )
    assert measured.memory_bytes_per_s == 6.0
    assert measured.flops_per_s == 90.0
