"""What a prepared history is worth: TTFT of a user message after a long tool loop.

A template with the habits of Qwen3's or GLM's drops the reasoning of a 50-step loop once the user
speaks again, so most of the log has to be computed anew. Two servers, each with its own engine
process and the same random model of 6 million parameters, are asked in turn (A B A B): one prepares
that history while the user thinks, the other computes it when the message is there. Every run is a
new session with words of its own, so nothing is shared between runs.

    PYTHONPATH=tests/support python benchmarks/prepared_history.py [--rounds 3] [--idle 10] [--json]
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from circumstances import circumstances
from text_models import glm4, qwen3
from tiny_models import save_random

from agentserve import wire
from agentserve.assembly import assemble, torch_backend
from agentserve.config import ModelSettings, ServerSettings
from agentserve.sessions.service import SessionService

RESULT = Path("benchmarks/results/prepared_history.json")
SIZES = {
    "vocab_size": 20_032,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
}
KV_BYTES = 512 << 20  # room for all runs, so that no run evicts what another left
FAMILIES = {
    "qwen3": (qwen3, "<think>\nThat is all.\n</think>\n\nDone."),
    "glm4": (glm4, "\n<think>That is all.</think>\nDone."),
}
STEPS = 50
WORDS = ("file", "line", "value", "return", "test", "error", "module", "class", "open", "left")
TOOLS = [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}]
ME = "local"


def words(source: random.Random, count: int) -> str:
    """Return some text of `count` words."""
    return " ".join(source.choices(WORDS, k=count))


def past_loop(source: random.Random, steps: int) -> list[dict[str, Any]]:
    """Return the items of a tool loop in which the model thought before each call."""
    items: list[dict[str, Any]] = [{"type": "user", "content": words(source, 20)}]
    for step in range(steps):
        thought = {"type": "reasoning", "text": words(source, 60)}
        call = {"type": "tool_call", "call_id": f"c{step}", "name": "read", "arguments": {}}
        items.append({"type": "assistant", "content": [thought, call]})
        items.append({"type": "tool_result", "call_id": f"c{step}", "output": words(source, 80)})
    return items


@contextlib.asynccontextmanager
async def serving(directory: Path, prefills: int) -> AsyncIterator[SessionService]:
    """Run a server without its sockets, with an engine process."""
    settings = ModelSettings(str(directory), kv_bytes=KV_BYTES, host_bytes=0, dtype="float32")
    server = ServerSettings(allow_force=True, prepared_prefills=prefills)
    assembly = assemble(directory, torch_backend(settings), server)
    async with assembly.app.router.lifespan_context(assembly.app):
        while not assembly.service.ready()[0]:  # noqa: ASYNC110 - it only answers
            await asyncio.sleep(0.1)
        yield assembly.service


async def run_turn(service: SessionService, session: str, **body: Any) -> wire.Turn:
    """Run one turn to its end."""
    request = wire.decode(wire.encode(body), wire.TurnRequest)
    turn = await (await service.start_turn(ME, session, request)).result()
    if turn.status != "completed" and turn.stop_reason != "max_tokens":
        raise RuntimeError(f"the turn ended as {turn.status}: {turn.error}")
    return turn


async def measure(
    service: SessionService, seed: int, answer: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Answer after a loop, wait, and return what the next user message meets."""
    source = random.Random(seed)
    body = {
        "system": words(source, 40),
        "tools": TOOLS,
        "history": past_loop(source, args.steps),
    }
    info, _ = await service.create(ME, wire.decode(wire.encode(body), wire.CreateRequest))
    forced = [{"type": "text", "text": answer}]
    done = await run_turn(service, info.id, input=[], debug={"force": forced})
    await asyncio.sleep(args.idle)
    turn = await run_turn(service, info.id, input=words(source, 12), max_output_tokens=1)
    await service.delete(ME, info.id, keep_transcript=False)
    usage = turn.usage
    return {
        "loop_tokens": done.usage.input_tokens,
        "ttft_ms": turn.timing_ms.ttft,
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "prepared_tokens": usage.prepared_tokens,
        "recomputed_tokens": sum(part.tokens for part in usage.recomputed),
        "new_tokens": usage.new_tokens,
    }


async def compare(
    directory: Path, answer: str, args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Ask both servers in turn; the first round only warms them."""
    runs: dict[str, list[dict[str, Any]]] = {"prepared": [], "unprepared": []}
    async with serving(directory, 2) as prepared, serving(directory, 0) as unprepared:
        for number in range(args.rounds + 1):
            for name, service in (("prepared", prepared), ("unprepared", unprepared)):
                run = await measure(service, number, answer, args)
                print(f"{number or 'warm-up':>8} {name:<11} {run}", flush=True)
                if number:
                    runs[name].append(run)
    return runs


def run_family(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one family; return its model, medians and runs."""
    tokenizer, answer = FAMILIES[family]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        for file in tokenizer().iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        model = save_random("qwen3", directory, **SIZES)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        runs = asyncio.run(compare(directory, answer, args))
    medians = {
        name: {key: statistics.median(run[key] for run in some) for key in some[0]}
        for name, some in runs.items()
    }
    ratio = medians["unprepared"]["ttft_ms"] / max(1, medians["prepared"]["ttft_ms"])
    print(json.dumps(medians, indent=1))
    print(f"{family}: TTFT without preparation is {ratio:.1f} times as long", flush=True)
    return {
        "parameters": parameters,
        "medians": medians,
        "ttft_ratio": round(ratio, 2),
        "runs": runs,
    }


def main() -> None:
    """Measure, print the medians, and write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each server")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the tool loop")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds before the message")
    parser.add_argument("--json", nargs="?", type=Path, const=RESULT, help="write the result")
    args, head = parser.parse_args(), circumstances("prepared_history")
    families = {family: run_family(family, args) for family in FAMILIES}
    if args.json:
        result = {
            **head,
            "model": {**SIZES, "dtype": "float32", "weights": "random"},
            "workload": {"steps": args.steps, "idle_s": args.idle, "rounds": args.rounds},
            "families": families,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
