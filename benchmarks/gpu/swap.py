"""The project's copier against a plain copy of the same bytes in one piece, and beside compute."""

import time
from collections.abc import Callable
from typing import Any

import torch

from agentserve.engine.copier import Copier
from agentserve.engine.plan import Copy
from agentserve.model.copier import host_slab, open_device
from agentserve.model.decoder import empty_cache
from benchmarks.gpu.sizes import BLOCK_TOKENS, Sizes
from benchmarks.gpu.timing import middle, seconds_of, synchronize

PATIENCE_S = 30.0
DIRECTIONS = {"save": ("save",), "load": ("load",), "both": ("save", "load")}


class Tiers:
    """Two tiers of blocks: the lower half of each is for saves, the upper half for loads."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.count = sizes.copied_blocks
        cache = empty_cache(
            sizes.model, 2 * self.count, BLOCK_TOKENS, torch.bfloat16, device
        ).normal_()
        self.block_bytes = cache[0].nbytes
        slab = host_slab(cache, 2 * self.count)
        slab.zero_()
        self.copier = Copier(open_device(cache, slab))
        self.submit_s = 0.0
        self._tickets = 0
        self._waiting: set[int] = set()

    def submit(self, kinds: tuple[str, ...], first: int, count: int) -> None:
        """Queue `count` copies of each kind from block `first` on, wrapping around."""
        start = time.perf_counter()
        copies = []
        for n in range(count):
            for kind in kinds:
                block = (first + n) % self.count + (self.count if kind == "load" else 0)
                copies.append(Copy(self._tickets, 0, block, block, BLOCK_TOKENS, kind))
                self._tickets += 1
        self._waiting.update(copy.ticket for copy in copies)
        self.copier.submit(copies)
        self.submit_s = time.perf_counter() - start

    def poll(self) -> None:
        self._waiting.difference_update(self.copier.poll())

    def finish(self) -> None:
        """Wait for every ticket; raises TimeoutError when one does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while self._waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._waiting)} copies did not end")
            self.copier.wait(0.01)
            self.poll()


def one_piece(device: str, size: int) -> dict[str, Callable[[], None]]:
    """Return plain copies of `size` bytes: page-locked by torch, one call a direction."""
    pinned = device != "cpu"
    ends = {
        kind: (
            torch.zeros(size, dtype=torch.uint8, device=device),
            torch.zeros(size, dtype=torch.uint8, pin_memory=pinned),
        )
        for kind in ("save", "load")
    }
    side = torch.cuda.Stream(device) if pinned else None

    def save() -> None:
        ends["save"][1].copy_(ends["save"][0], non_blocking=True)

    def load() -> None:
        ends["load"][0].copy_(ends["load"][1], non_blocking=True)

    def both() -> None:
        with torch.cuda.stream(side):  # does nothing without a GPU
            save()
        load()

    return {"save": save, "load": load, "both": both}


def bandwidth(sizes: Sizes, device: str) -> dict[str, Any]:
    """Measure each direction and both at once, the plain copy and ours in turns."""
    tiers = Tiers(sizes, device)
    plain = one_piece(device, tiers.count * tiers.block_bytes)
    results: dict[str, Any] = {"block_bytes": tiers.block_bytes, "blocks_each_way": tiers.count}
    for name, kinds in DIRECTIONS.items():

        def ours(kinds: tuple[str, ...] = kinds) -> None:
            tiers.submit(kinds, 0, tiers.count)
            tiers.finish()

        seconds: dict[str, list[float]] = {"plain": [], "ours": [], "submit": []}
        for repeat in range(sizes.repeats + 1):
            pair = seconds_of(device, plain[name]), seconds_of(device, ours)
            if repeat:  # the first touches the memory
                for key, value in zip(seconds, (*pair, tiers.submit_s), strict=True):
                    seconds[key].append(value)
        moved = tiers.count * tiers.block_bytes * len(kinds)
        middles = {key: middle(values) for key, values in seconds.items()}
        results[name] = {
            "plain_gb_s": round(moved / middles["plain"] / 1e9, 3),
            "ours_gb_s": round(moved / middles["ours"] / 1e9, 3),
            "ratio": round(middles["plain"] / middles["ours"], 3),
            "submit_share": round(middles["submit"] / middles["ours"], 3),
            "seconds": seconds,
        }
    return results


def overlap(sizes: Sizes, device: str) -> dict[str, Any]:
    """Measure steps of matrix products alone and with copies both ways under way.

    Each step submits its copies and then its products, as the engine does, and waits for the
    products. `wall_slowdown` includes the host's time to submit; `product_slowdown` does not.
    """
    tiers = Tiers(sizes, device)
    side = torch.randn(2, sizes.product, sizes.product, device=device).to(torch.bfloat16)
    out = torch.empty_like(side[0])

    def products() -> None:
        for _ in range(sizes.products):
            torch.mm(side[0], side[1], out=out)

    def loop(copies: int) -> tuple[float, list[float]]:
        """Return the seconds of all steps, and of the products of each."""
        each = []
        start = time.perf_counter()
        for step in range(sizes.steps):
            if copies:
                tiers.submit(("save", "load"), step * copies, copies)
            begin = time.perf_counter()
            products()
            synchronize_compute(device)
            each.append(time.perf_counter() - begin)
            tiers.poll()
        return time.perf_counter() - start, each

    loop(0)  # warm-up
    alone, each_alone = loop(0)
    beside, each_beside = loop(sizes.step_copies)
    late = seconds_of(device, tiers.finish)
    again, _ = loop(0)
    moved = 2 * sizes.steps * sizes.step_copies * tiers.block_bytes
    return {
        "steps": sizes.steps,
        "step_alone_s": round(alone / sizes.steps, 6),
        "step_alone_again_s": round(again / sizes.steps, 6),
        "step_with_copies_s": round(beside / sizes.steps, 6),
        "submit_s": round(tiers.submit_s, 6),
        "copies_a_step_each_way": sizes.step_copies,
        "wall_slowdown": round(beside / alone, 3),
        "product_slowdown": round(middle(each_beside) / middle(each_alone), 3),
        "copied_gb_s": round(moved / (beside + late) / 1e9, 3),
        "late_s": round(late, 6),
    }


def synchronize_compute(device: str) -> None:
    """Wait for the products, not for copies beside them."""
    if device == "cpu":
        synchronize(device)
    else:
        torch.cuda.current_stream(device).synchronize()
