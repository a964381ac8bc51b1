"""No slowdown with history: turn 100 of a loop of equal turns, against what its attention explains.

One agent on SmolLM2 and a server of its own, without gaps, a few times over. The time of a turn is
fitted as a + b * context. What b must be at least is computed from the attention kernels' rates,
measured in the same run on cold KV: each decode pass reads the context's KV once, the prefill of
the turn's new tokens attends to it. What turn 100 costs beyond turn 1 and beyond that is the
residual. Turns 1 and 100 are each the median of ten turns at that end; the first turn of all
computes the prompt and is left out.

    python benchmarks/history.py [--turns 101] [--rounds 3] [--json]
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from circumstances import circumstances
from floor_rates import attention_flops, decode_attention, kv_layer_bytes, prefill_attention
from least_squares import Line, fit_line

from agentserve.model.build import prepare_environment
from agentserve.model.prepare import prepare
from agentserve.model.spec import ModelSpec, load_spec
from agentserve.replay.generator import Workload, generate
from agentserve.replay.report import TurnRecord
from agentserve.replay.runner import ReplaySettings, replay
from agentserve.replay.server import own_server

RESULT = Path("benchmarks/results/history.json")
MODEL = "smollm2-135m"
EDGE = 10
SIZES = {"prompt": 100, "new": 40, "output": 20}  # 100 turns fit a context of 8,192


class Turn(msgspec.Struct, frozen=True):
    """One turn number, the median over the rounds."""

    number: int
    context: int  # tokens before its output
    new: int
    output: int
    turn_s: float
    ttft_s: float


class Explained(msgspec.Struct, frozen=True):
    """Seconds for each token of context: of a turn's prefill, and of the whole turn."""

    ttft_s: float
    turn_s: float


class Verdict(msgspec.Struct, frozen=True):
    """One kind of time over the loop; seconds, and seconds for a token of context."""

    first_s: float
    last_s: float
    growth_s: float
    explained_s: float  # of the growth, by attention
    residual_s: float  # what is left of it
    residual_of_first: float
    slope_s: float
    slope_error_s: float
    explained_slope_s: float


class Unseen:
    """An observer who looks away."""

    def heard(self, user: str) -> None:
        """Show nothing."""

    def turn(self, record: TurnRecord) -> None:
        """Show nothing."""


def explained(spec: ModelSpec, new: int, output: int, context: int) -> Explained:
    """Return what a token of context costs by the rates of the kernels at about that context."""
    prefill = prefill_attention(spec, new, context)
    decode = decode_attention(spec, 1, context)
    flops = attention_flops(spec, new, 1) - attention_flops(spec, new, 0)
    ttft = spec.layers * flops / prefill.flops_per_s
    per_pass = spec.layers * kv_layer_bytes(spec, 1) / decode.kv_bytes_per_s
    return Explained(ttft, ttft + (output - 1) * per_pass)


def verdict(
    contexts: Sequence[float], seconds: Sequence[float], explained_slope_s: float, edge: int = EDGE
) -> Verdict:
    """Compare both ends of a loop, and fit a line through it."""
    first, last = statistics.median(seconds[:edge]), statistics.median(seconds[-edge:])
    apart = statistics.median(contexts[-edge:]) - statistics.median(contexts[:edge])
    line: Line = fit_line(contexts, seconds)
    residual = last - first - explained_slope_s * apart
    return Verdict(
        first_s=first,
        last_s=last,
        growth_s=last - first,
        explained_s=explained_slope_s * apart,
        residual_s=residual,
        residual_of_first=residual / first,
        slope_s=line.slope,
        slope_error_s=line.slope_error,
        explained_slope_s=explained_slope_s,
    )


def medians(rounds: Sequence[Sequence[TurnRecord]]) -> list[Turn]:
    """Return the loop with the median times of its rounds, without the turn of the prompt."""
    return [
        Turn(
            number=same[0].index - 1,
            context=same[0].input_tokens,
            new=same[0].prefill_computed,
            output=same[0].output_tokens,
            turn_s=statistics.median(record.latency_s for record in same),
            ttft_s=statistics.median(record.ttft_s for record in same),
        )
        for same in list(zip(*rounds, strict=True))[1:]
    ]


def play(url: str, workload: Workload) -> list[TurnRecord]:
    """Run the loop once."""
    report = asyncio.run(replay(generate(workload), url, ReplaySettings(), Unseen()))
    if report.incomplete:
        raise SystemExit("; ".join(report.incomplete))
    return report.records


def measured_turns(turns: int, rounds: int) -> list[Turn]:
    """Play the loop a few times on a server of its own; other words each time."""
    loops = []
    with own_server(MODEL) as url:
        for seed in range(rounds):
            loop = Workload(sessions=1, turns=turns, gap=0.0, seed=seed, **SIZES)
            loops.append(play(url, loop))
            print(
                f"round {seed + 1}: {sum(turn.latency_s for turn in loops[-1]):.1f} s", flush=True
            )
    return medians(loops)


def lines_of(name: str, verdict: Verdict, turns: int) -> list[str]:
    """Return a verdict in words."""
    ms = {field: getattr(verdict, field) * 1e3 for field in verdict.__struct_fields__}
    return [
        f"{name}: turn 1 {ms['first_s']:.1f} ms, turn {turns} {ms['last_s']:.1f} ms: "
        f"{ms['growth_s']:+.1f} ms, of which attention explains {ms['explained_s']:.1f} ms; "
        f"residual {ms['residual_s']:+.1f} ms, {verdict.residual_of_first:+.1%} of turn 1",
        f"  ms per 1,000 tokens: {ms['slope_s'] * 1e3:.2f} +- {2e3 * ms['slope_error_s']:.2f}, "
        f"explained {ms['explained_slope_s'] * 1e3:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=101, help="the first has the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    head = circumstances("history")
    turns = measured_turns(args.turns, args.rounds)
    prepare_environment(0)
    new, output = (
        statistics.median(t.new for t in turns),
        statistics.median(t.output for t in turns),
    )
    middle = round(statistics.median(turn.context for turn in turns))
    per_token = explained(load_spec(prepare(MODEL)), round(new), round(output), middle)
    contexts = [float(turn.context) for turn in turns]
    edge = min(EDGE, len(turns) // 2)
    summary = {
        "ttft": verdict(contexts, [turn.ttft_s for turn in turns], per_token.ttft_s, edge),
        "turn": verdict(contexts, [turn.turn_s for turn in turns], per_token.turn_s, edge),
    }
    print(
        f"{len(turns)} turns of {new:.0f} new and {output:.0f} output tokens, {args.rounds} rounds"
    )
    for name, one in summary.items():
        print(*lines_of(name, one, len(turns)), sep="\n")
    if args.json:
        rest: dict[str, Any] = {"model": MODEL, "rounds": args.rounds, "sizes": SIZES}
        rest |= {"summary": msgspec.to_builtins(summary), "turns": msgspec.to_builtins(turns)}
        RESULT.write_text(json.dumps(head | rest) + "\n")


if __name__ == "__main__":
    main()
