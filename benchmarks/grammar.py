"""What constraining a turn costs: compiling, the masks of each step, the sampler's part.

Masks are filled along the calls that a model would write, on SmolLM2's vocabulary; the sampler
takes them on random logits. Beside them stands the decode step of the same model, and how long a
mask takes on another thread while such a step runs.

    python benchmarks/grammar.py [--json benchmarks/results/grammar.json]
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from circumstances import circumstances
from decode_step import decode_ms

from agentserve import wire
from agentserve.config import ModelSettings
from agentserve.engine.compiler import CompilerProcess
from agentserve.engine.grammars import Answer
from agentserve.engine.plan import SamplingParams
from agentserve.model.build import load_runner
from agentserve.model.grammar import XGrammar, grammar_compiler
from agentserve.model.prepare import prepare
from agentserve.model.sampler import sample
from agentserve.sessions.grammar import response_tag, structural_tag
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import JSON

TOOLS = [
    wire.Tool(
        f"tool_{i}",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "mode": {"enum": ["read", "write"]},
                "limit": {"type": "integer", "minimum": 0},
            },
            "required": ["path"],
        },
    )
    for i in range(8)
]
CALL = JSON.call("tool_3", {"path": "src/main.py and a long text " * 4, "mode": "read", "limit": 7})
LETTERS = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z ]{0,100}$"}}}
WORDS = {"enum": [f"word {i}" for i in range(1500)]}
CASES: dict[str, tuple[str | None, str]] = {
    "auto, in free text": (structural_tag(TOOLS, "auto", JSON), "Let me look at the files. " * 6),
    "auto, in a call": (structural_tag(TOOLS, "auto", JSON), CALL),
    "required": (structural_tag(TOOLS, "required", JSON), CALL),
    "named": (structural_tag(TOOLS, "tool_3", JSON), CALL),
    "pattern of 100 letters": (response_tag(LETTERS), json.dumps({"a": "some letters " * 7})),
    "1,500 words": (response_tag(WORDS), '"word 1234"'),
}


def compiled(compiler: CompilerProcess, number: int, spec: str) -> tuple[XGrammar, float]:
    """Return a grammar and the seconds until it was there."""
    changed = threading.Event()
    compiler.listen(changed.set)
    begun = time.perf_counter()
    compiler.begin(number, spec)
    answers: list[Answer] = []
    while not answers:
        changed.wait(1)
        changed.clear()
        answers = compiler.poll()
    assert isinstance(answers[0].compiled, XGrammar), answers[0].error
    return answers[0].compiled, time.perf_counter() - begun


def along(grammar: XGrammar, ids: list[int]) -> tuple[list[float], list[float], list[Any]]:
    """Return the seconds of each mask and each accepted token, and the masks."""
    matcher = grammar.matcher()
    fills, accepts, masks = [], [], []
    for token in ids:
        begun = time.perf_counter()
        mask = matcher.mask()
        middle = time.perf_counter()
        matcher.accept(token)
        fills.append(middle - begun)
        accepts.append(time.perf_counter() - middle)
        masks.append(mask)
    return fills, accepts, masks


def sampling_us(masks: list[Any], vocab_size: int, temperature: float) -> float:
    """Return what a mask adds to the sampling of a row, in microseconds."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(vocab_size).astype(np.float32)
    params = SamplingParams(temperature=temperature, seed=1)
    plain = median_us(lambda: sample(logits, params, 1), 50)
    masked = [median_us(lambda m=mask: sample(logits, params, 1, mask=m), 5) for mask in masks]  # type: ignore[misc]
    return statistics.median(masked) - plain


def median_us(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    head = circumstances("grammar")
    directory = prepare("smollm2-135m")
    tokenizer = Tokenizer.load(directory)
    runner = load_runner(msgspec.to_builtins(ModelSettings(str(directory), host_bytes=0)))
    step_us = decode_ms(runner, 1, 512, 20) * 1e3
    compiler = grammar_compiler(directory, runner.info.vocab_size)
    compiled(compiler, 0, response_tag({}))  # starts the process
    rows = {}
    print(f"decode step at 512 tokens: {step_us:.0f} us")
    for number, (name, (spec, text)) in enumerate(CASES.items(), 1):
        assert spec is not None
        grammar, seconds = compiled(compiler, number, spec)
        ids = tokenizer.encode_text(text)
        runs = [along(grammar, ids) for _ in range(5)]
        fills = [us * 1e6 for fills, _, _ in runs for us in fills]
        masks = [mask for mask in runs[0][2] if mask is not None]
        row = {
            "compile_ms": seconds * 1e3,
            "tokens": len(ids),
            "mask_us": {
                "p50": statistics.median(fills),
                "p99": np.quantile(fills, 0.99),
                "most": max(fills),
            },
            "accept_us": statistics.median(us * 1e6 for _, accepts, _ in runs for us in accepts),
            "sampler_greedy_us": sampling_us(masks, runner.info.vocab_size, 0.0),
            "sampler_drawn_us": sampling_us(masks, runner.info.vocab_size, 0.8),
        }
        total = row["mask_us"]["p50"] + row["accept_us"] + row["sampler_greedy_us"]
        row["share_of_a_step"] = total / step_us
        rows[name] = row
        print(
            f"{name:24} compile {row['compile_ms']:5.0f} ms  mask {row['mask_us']['p50']:4.0f} us "
            f"(p99 {row['mask_us']['p99']:.0f})  accept {row['accept_us']:3.0f}  sampler greedy "
            f"{row['sampler_greedy_us']:4.0f}, drawn {row['sampler_drawn_us']:4.0f}  "
            f"{row['share_of_a_step']:.2%} of a step"
        )
    compiler.end()
    if args.json:
        result = {"measured": head, "decode_step_us": step_us, "cases": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
