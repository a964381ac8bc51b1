"""Time to the first token of a turn whose history is resident, offloaded, or to be recomputed."""

import time
from typing import Any

import msgspec
import torch

from benchmarks.gpu.play import Play, random_tokens
from benchmarks.gpu.report import Report
from benchmarks.gpu.sizes import BLOCK_TOKENS, Sizes
from benchmarks.gpu.timing import middle, seconds_of

SPARE_BYTES = 6 << 30  # activations, and what the allocator keeps
TIMES = ("resident_s", "offloaded_s", "recomputed_s")


def resume(sizes: Sizes, device: str, report: Report) -> dict[str, Any]:
    """Measure every context that there is time for; rows are reported as they come."""
    layers = layers_that_fit(sizes, device)
    spec = msgspec.structs.replace(sizes.model, layers=layers)
    longest = -(-(sizes.contexts[-1] + sizes.new_tokens) // BLOCK_TOKENS)
    play = Play(spec, device, longest, sizes.contexts[-1] // BLOCK_TOKENS)
    rows: dict[str, Any] = {}
    results = {
        "layers": layers,
        "weight_bytes": play.runner.info.weight_bytes,
        "kv_bytes_a_token": play.block_bytes // BLOCK_TOKENS,
        "new_tokens": sizes.new_tokens,
        "chunk": sizes.chunk,
        "contexts": rows,
    }
    play.open(list(range(longest)))
    play.feed(0, random_tokens(spec, sizes.chunk, seed=1), sizes.chunk)  # warm-up
    took, before = 0.0, sizes.contexts[0]
    for context in sizes.contexts:
        estimate = took * (context / before) ** 2
        if estimate > report.left():
            rows[str(context)] = {"skipped": f"{estimate:.0f} s, {report.left():.0f} s are left"}
            continue
        start = time.monotonic()
        row = measure(play, sizes, context, device)
        took, before = time.monotonic() - start, context
        rows[str(context)] = row | extrapolated(row, sizes.full_layers, layers)
        report.put(resume=results)
    return results


def measure(play: Play, sizes: Sizes, context: int, device: str) -> dict[str, Any]:
    """Return the times to the first token of one turn after `context` tokens, three ways."""
    spec = play.spec
    tokens = random_tokens(spec, context + sizes.new_tokens, seed=context)
    history = [(block, block) for block in range(context // BLOCK_TOKENS)]
    firsts: dict[str, list[int]] = {name: [] for name in TIMES}

    def turn(name: str, start: int) -> None:
        firsts[name].append(play.feed(start, tokens[start:], sizes.chunk))

    def load() -> None:
        play.move("load", history)

    def load_and_turn() -> None:
        load()
        turn("offloaded_s", context)

    recomputed = seconds_of(device, lambda: turn("recomputed_s", 0))
    resident = [
        seconds_of(device, lambda: turn("resident_s", context)) for _ in range(sizes.repeats)
    ]
    save = seconds_of(device, lambda: play.move("save", history))
    loads, offloaded = [], []
    for _ in range(sizes.repeats):
        play.cache[: len(history)] = float("nan")
        loads.append(seconds_of(device, load))
        play.cache[: len(history)] = float("nan")
        offloaded.append(seconds_of(device, load_and_turn))
    # Recomputing cuts the history into other chunks, so its bits, and rarely its token, may differ.
    if len(set(firsts["resident_s"] + firsts["offloaded_s"])) != 1:
        raise ValueError(f"a resumed turn gave other tokens: {firsts}")
    return {
        "resident_s": middle(resident),
        "offloaded_s": middle(offloaded),
        "recomputed_s": round(recomputed, 6),
        "load_s": middle(loads),
        "save_s": round(save, 6),
        "moved_bytes": len(history) * play.block_bytes,
        "recomputed_token_equal": firsts["recomputed_s"][0] == firsts["resident_s"][0],
    }


def extrapolated(row: dict[str, Any], full: int, layers: int) -> dict[str, Any]:
    """Return the times of the full model, labelled, where fewer layers had to be run."""
    if layers == full:
        return {}
    times = {name: round(row[name] * full / layers, 6) for name in TIMES}
    return {f"extrapolated_from_{layers}_to_{full}_layers": times}


def layers_that_fit(sizes: Sizes, device: str) -> int:
    """Return how many of the model's layers fit the device's free memory, weights and KV."""
    if device == "cpu":
        return sizes.full_layers
    model = sizes.model
    free, _ = torch.cuda.mem_get_info(device)
    ends = 2 * model.vocab_size * model.hidden_size * 2
    heads = model.heads + 2 * model.kv_heads
    weights = model.hidden_size * ((heads + model.heads) * model.head_dim + 3 * model.inner_size)
    kv = 2 * model.kv_heads * model.head_dim * (sizes.contexts[-1] + sizes.new_tokens)
    fit = (free - SPARE_BYTES - ends) // (2 * (weights + kv))
    if fit < 1:
        raise MemoryError(f"{free} bytes of device memory are free: not enough for one layer")
    return min(sizes.full_layers, fit)
