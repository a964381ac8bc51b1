"""The least time that a workload can take on this machine, from its bytes and its FLOPs.

    python benchmarks/floor.py [--workload sessions=16,turns=20,gap=1]... [--json]

Why nothing that computes the same model can be faster, given the measured rates:

- A forward pass reads every weight once and all KV that its tokens attend to, and does the FLOPs of
  its products. It takes at least the longer of bytes / rate of memory and FLOPs / rate of products,
  as if the two overlapped perfectly and all else were free: norms, rotary embedding, softmax,
  sampling, HTTP, templates. The rates are the best that any method here reaches, for rows of any
  number; what the cache keeps of cold weights from pass to pass is in the rate of memory.
- Passes of one session cannot overlap: a token needs the one before it, and a turn needs its tool's
  result. A session of n output tokens a turn needs n passes a turn (the first computes the prompt).
  So no session ends before its passes and its gaps have added up, and nothing is done twice.
- Of many sessions, passes can share the reading of weights and of the shared prompt's KV, at most
  all sessions in every pass. The FLOPs add up. The makespan is at least the longest session, and at
  least the longer of all bytes and all FLOPs.
- Counted in favour of the server: the shared prompt is computed once, the last layer computes more
  than keys and values only where a token is sampled, the template's own tokens are free, and the
  last token of a session gets no KV.

It does not hold for what computes another function (speculation aside: that has fewer passes, KV or
weights with fewer bits, products by Strassen's method).
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from circumstances import circumstances
from floor_rates import Rates, attention_flops, kv_layer_bytes, measure_rates

from agentserve.model.prepare import prepare
from agentserve.model.spec import ModelSpec, load_spec
from agentserve.replay.generator import Workload, generate, parse_workload

RESULT = Path("benchmarks/results/floor.json")
MODEL = "smollm2-135m"
CASES = {
    "single": Workload(sessions=1, gap=0.05),
    "sixteen": Workload(sessions=16, gap=1.0),
}


class TurnWork(msgspec.Struct, frozen=True):
    """One turn: tokens computed, tokens with KV before it, tokens generated, the wait after it."""

    new: int
    cached: int
    output: int
    gap_s: float = 0.0


class Cost(msgspec.Struct, frozen=True):
    """Bytes and FLOPs of a pass, or of several."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    product_flops: int = 0
    attention_flops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def memory_s(self, rates: Rates) -> float:
        """The time of the bytes."""
        return (self.weight_bytes + self.kv_bytes) / rates.memory_bytes_per_s

    def compute_s(self, rates: Rates) -> float:
        """The time of the FLOPs."""
        return (self.product_flops + self.attention_flops) / rates.flops_per_s

    def seconds(self, rates: Rates) -> float:
        """The least time of a pass of this cost."""
        return max(self.memory_s(rates), self.compute_s(rates))


class Floor(msgspec.Struct, frozen=True):
    """The least makespan and its parts; the parts of the longest session are named so."""

    seconds: float
    session_s: float  # the longest session alone: its turns and gaps
    session_prefill_s: float
    session_decode_s: float
    session_gaps_s: float
    work_s: float  # of all sessions: the longer of the next two
    memory_s: float
    compute_s: float
    ttft_p50_s: float  # of a turn alone on the machine
    turn_p50_s: float
    work: Cost


def pass_cost(
    spec: ModelSpec, new: int, cached: int, sampled: int = 1, item_bytes: int = 2
) -> Cost:
    """Return the cost of one pass over `new` tokens of a sequence, after `cached` ones."""
    qkv = spec.hidden_size * (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    keys = spec.hidden_size * 2 * spec.kv_heads * spec.head_dim
    layer = qkv + spec.heads * spec.head_dim * spec.hidden_size
    layer += 3 * spec.hidden_size * spec.inner_size
    head = spec.hidden_size * spec.vocab_size
    before_last = (spec.layers - 1) * layer
    products = new * (before_last + keys) + sampled * (layer - keys + head)
    attention = (spec.layers - 1) * attention_flops(spec, new, cached)
    attention += attention_flops(spec, 1, cached + new - 1) * sampled
    return Cost(
        weight_bytes=(spec.layers * layer + head) * item_bytes,
        kv_bytes=spec.layers * kv_layer_bytes(spec, cached, item_bytes),
        product_flops=2 * products,
        attention_flops=attention,
    )


def turn_passes(spec: ModelSpec, turn: TurnWork, item_bytes: int = 2) -> list[Cost]:
    """Return the passes of a turn: its prefill, which gives the first token, then a token each."""
    context = turn.cached + turn.new
    first = pass_cost(spec, turn.new, turn.cached, item_bytes=item_bytes)
    rest = range(turn.output - 1)
    return [first, *(pass_cost(spec, 1, context + n, item_bytes=item_bytes) for n in rest)]


def sessions_of(workload: Workload) -> list[list[TurnWork]]:
    """Return the turns of every session in words, which are fewer than its tokens.

    The first session computes the shared prompt. A turn's last token gets its KV in the next turn.
    """
    sessions = []
    for number, scenario in enumerate(generate(workload)):
        turns: list[TurnWork] = []
        length = workload.prompt if number else 0
        for index, turn in enumerate(scenario.turns):
            new = workload.new + 1 if index else (workload.first or workload.new)
            new += workload.prompt if not length else 0
            turns.append(TurnWork(new, length, workload.output, turn.tool_seconds or 0.0))
            length += new + workload.output - 1
        sessions.append(turns)
    return sessions


def floor_of(workload: Workload, spec: ModelSpec, rates: Rates, *, item_bytes: int = 2) -> Floor:
    """Return the least time of a generated workload; weights and KV take `item_bytes` an element.

    Nothing is cached at the start; see the module's docstring for what is assumed.
    """
    return floor_of_sessions(
        sessions_of(workload), spec, rates, shared=workload.prompt, item_bytes=item_bytes
    )


def floor_of_sessions(
    sessions: Sequence[Sequence[TurnWork]],
    spec: ModelSpec,
    rates: Rates,
    *,
    shared: int = 0,
    item_bytes: int = 2,
) -> Floor:
    """Return the least time of sessions that all start at once.

    shared: tokens at the start of every session that are the same; only one has them as new.
    """
    passes = [[turn_passes(spec, turn, item_bytes) for turn in turns] for turns in sessions]
    alone = [_alone(turns, costs, rates) for turns, costs in zip(sessions, passes, strict=True)]
    prefill_s, decode_s, gaps_s = max(alone, key=sum)
    work = _work(passes, kv_layer_bytes(spec, shared, item_bytes) * spec.layers)
    turns_s = [[cost.seconds(rates) for cost in costs] for session in passes for costs in session]
    session_s, work_s = prefill_s + decode_s + gaps_s, work.seconds(rates)
    return Floor(
        seconds=max(session_s, work_s),
        session_s=session_s,
        session_prefill_s=prefill_s,
        session_decode_s=decode_s,
        session_gaps_s=gaps_s,
        work_s=work_s,
        memory_s=work.memory_s(rates),
        compute_s=work.compute_s(rates),
        ttft_p50_s=statistics.median(seconds[0] for seconds in turns_s),
        turn_p50_s=statistics.median(sum(seconds) for seconds in turns_s),
        work=work,
    )


def _alone(
    turns: Sequence[TurnWork], passes: list[list[Cost]], rates: Rates
) -> tuple[float, float, float]:
    """Return a session's seconds of prefill, of decoding and of gaps between turns."""
    prefill = sum(costs[0].seconds(rates) for costs in passes)
    decode = sum(cost.seconds(rates) for costs in passes for cost in costs[1:])
    return prefill, decode, sum(turn.gap_s for turn in turns[:-1])


def _work(passes: list[list[list[Cost]]], shared_kv: int) -> Cost:
    """Add up all sessions, with weights and the shared prompt's KV read once for all in a pass."""
    flat = [[cost for costs in session for cost in costs] for session in passes]
    longest = max(flat, key=len)
    total = sum((cost for session in flat for cost in session), Cost())
    shared = [sum(min(cost.kv_bytes, shared_kv) for cost in session) for session in flat]
    return msgspec.structs.replace(
        total,
        weight_bytes=sum(cost.weight_bytes for cost in longest),
        kv_bytes=total.kv_bytes - sum(shared) + max(shared),
    )


def _values(cost: Cost) -> tuple[int, ...]:
    return (cost.weight_bytes, cost.kv_bytes, cost.product_flops, cost.attention_flops)


def rate_lines(rates: Rates) -> list[str]:
    """Return the rates as lines of a table."""
    lines = [f"{name:<18}{rate / 1e9:7.1f} GB/s" for name, rate in rates.memory.items()]
    rows = sorted({product.rows for product in rates.products})
    lines.append(f"{'GFLOP/s, rows:':<18}" + "".join(f"{n:>7}" for n in rows))
    by_cell = {(product.method, product.rows): product for product in rates.products}
    methods = list(dict.fromkeys(product.method for product in rates.products))
    for method in methods:
        cells = [by_cell[method, n].flops_per_s / 1e9 for n in rows]
        lines.append(f"{method:<18}" + "".join(f"{cell:7.1f}" for cell in cells))
    lines.append("GB/s of weights")
    for method in methods:
        cells = [by_cell[method, n].weight_bytes_per_s / 1e9 for n in rows]
        lines.append(f"{method:<18}" + "".join(f"{cell:7.1f}" for cell in cells))
    for one in rates.attention:
        lines.append(
            f"attention {one.method:<18}{one.sequences:3} x {one.new:3} after {one.cached:4}"
            f"{one.flops_per_s / 1e9:8.1f} GFLOP/s{one.kv_bytes_per_s / 1e9:8.1f} GB/s"
        )
    best = (rates.memory_bytes_per_s / 1e9, rates.flops_per_s / 1e9)
    return [*lines, "the best: {:.1f} GB/s, {:.1f} GFLOP/s".format(*best)]


def floor_lines(name: str, floor: Floor) -> list[str]:
    """Return a floor as two lines."""
    return [
        f"{name:<10}{floor.seconds:7.1f} s   a turn alone p50 {floor.turn_p50_s:.3f} s, "
        f"TTFT p50 {floor.ttft_p50_s:.3f} s",
        f"{'':10}the longest session {floor.session_s:.1f} s: prefill "
        f"{floor.session_prefill_s:.1f}, decode {floor.session_decode_s:.1f}, gaps "
        f"{floor.session_gaps_s:.1f}; all work {floor.work_s:.1f} s: memory "
        f"{floor.memory_s:.1f}, FLOPs {floor.compute_s:.1f}",
    ]


def described(floor: Floor, workload: Workload) -> dict[str, Any]:
    """Return a floor for a result file."""
    return {"workload": msgspec.to_builtins(workload), **msgspec.to_builtins(floor)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--workload", action="append", default=[], help="sessions=16,turns=20,...")
    parser.add_argument("--json", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    head = circumstances("floor")
    cases = {text: parse_workload(text) for text in args.workload} or CASES
    spec = load_spec(prepare(args.model))
    rates = measure_rates(spec)
    floors = {name: floor_of(workload, spec, rates) for name, workload in cases.items()}
    print(*rate_lines(rates), sep="\n")
    for name, floor in floors.items():
        print(*floor_lines(name, floor), sep="\n")
    if args.json:
        result = head | {
            "model": args.model,
            "memory_bytes_per_s": rates.memory_bytes_per_s,
            "flops_per_s": rates.flops_per_s,
            "floors": {name: described(floor, cases[name]) for name, floor in floors.items()},
            "rates": msgspec.to_builtins(rates),
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
