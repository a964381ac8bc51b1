"""What a prepared history is worth: TTFT of a user message after a long tool loop.

A template with Qwen3's habits drops the reasoning of a 50-step loop once the user speaks again, so
most of the log has to be computed anew. Two servers, each with its own engine process and the same
random model of 6 million parameters, are asked in turn (A B A B): one prepares that history while
the user thinks, the other computes it when the message is there. Every run is a new session with
words of its own, so nothing is shared between runs.

    PYTHONPATH=tests/support python benchmarks/prepared_history.py [--rounds 5] [--idle 15] [--json]
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
from text_models import qwen3
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
KV_BYTES = 512 << 20  # for all runs: only free blocks are taken, and old prefixes are not free
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


async def measure(service: SessionService, seed: int, steps: int, idle: float) -> dict[str, Any]:
    """Answer after a loop, wait, and return what the next user message meets."""
    source = random.Random(seed)
    body = {
        "system": words(source, 40),
        "tools": TOOLS,
        "history": past_loop(source, steps),
    }
    info, _ = await service.create(ME, wire.decode(wire.encode(body), wire.CreateRequest))
    answer = {"type": "text", "text": "<think>\nThat is all.\n</think>\n\nDone."}
    done = await run_turn(service, info.id, input=[], debug={"force": [answer]})
    await asyncio.sleep(idle)
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


async def compare(directory: Path, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Ask both servers in turn; the first round only warms them."""
    runs: dict[str, list[dict[str, Any]]] = {"prepared": [], "unprepared": []}
    async with serving(directory, 2) as prepared, serving(directory, 0) as unprepared:
        for number in range(args.rounds + 1):
            for name, service in (("prepared", prepared), ("unprepared", unprepared)):
                run = await measure(service, number, args.steps, args.idle)
                print(f"{number or 'warm-up':>8} {name:<11} {run}", flush=True)
                if number:
                    runs[name].append(run)
    return runs


def main() -> None:
    """Measure, print the medians, and write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each server")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the tool loop")
    parser.add_argument("--idle", type=float, default=15.0, help="seconds before the message")
    parser.add_argument("--json", nargs="?", type=Path, const=RESULT, help="write the result")
    args, head = parser.parse_args(), circumstances("prepared_history")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        for file in qwen3().iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        model = save_random("qwen3", directory, **SIZES)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        runs = asyncio.run(compare(directory, args))
    medians = {
        name: {key: statistics.median(run[key] for run in some) for key in some[0]}
        for name, some in runs.items()
    }
    ratio = medians["unprepared"]["ttft_ms"] / max(1, medians["prepared"]["ttft_ms"])
    print(json.dumps(medians, indent=1), f"\nTTFT without preparation is {ratio:.1f} times as long")
    if args.json:
        shape = {"parameters": parameters, **SIZES, "dtype": "float32", "family": "qwen3, random"}
        given = {"steps": args.steps, "idle_s": args.idle, "rounds": args.rounds}
        result = {
            **head,
            "model": shape,
            "workload": given,
            "medians": medians,
            "ttft_ratio": round(ratio, 2),
            "runs": runs,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
