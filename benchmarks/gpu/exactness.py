"""Class (a) exactness: KV that was saved, overwritten and loaded elsewhere gives the same bits."""

import random
from typing import Any

import msgspec
import torch

from benchmarks.gpu.play import Play, random_tokens
from benchmarks.gpu.sizes import BLOCK_TOKENS, Sizes


class Mover:
    """After a turn: saves the sequence, overwrites all device KV, loads it into other blocks."""

    def __init__(self, play: Play, length: int) -> None:
        self._play = play
        self._length = length
        self._random = random.Random(5)
        self.moved_bytes = 0

    def __call__(self, table: list[int], tokens: int) -> list[int]:
        """Return the table after the move of its first `tokens` tokens."""
        used = -(-tokens // BLOCK_TOKENS)
        tail = tokens - (used - 1) * BLOCK_TOKENS
        host = self._random.sample(range(self._length), used)
        self._play.close()
        self._play.move("save", list(zip(table[:used], host, strict=True)), tail)
        self._play.cache.fill_(float("nan"))
        others = [block for block in range(2 * self._length) if block not in table]
        target = self._random.sample(others, self._length)
        self._play.move("load", list(zip(host, target[:used], strict=True)), tail)
        self._play.open(target)
        self.moved_bytes += 2 * used * self._play.block_bytes
        return target


def exactness(sizes: Sizes, device: str) -> dict[str, Any]:
    """Play the same turns unmoved and moved; raises ValueError unless tokens and KV are equal."""
    fed, generated = sizes.turn_tokens
    length = -(-(fed + generated) * sizes.turns // BLOCK_TOKENS)
    spec = msgspec.structs.replace(sizes.model, layers=sizes.exact_layers)
    play = Play(spec, device, 2 * length, length)
    mover = Mover(play, length)
    expected, kv = played(play, sizes, list(range(length)), None)
    play.cache.fill_(float("nan"))
    tokens, moved_kv = played(play, sizes, list(range(length)), mover)
    results = {
        "layers": sizes.exact_layers,
        "turns": sizes.turns,
        "tokens": len(tokens),
        "moved_bytes": mover.moved_bytes,
        "tokens_equal": tokens == expected,
        "kv_bytes_equal": torch.equal(moved_kv, kv),
    }
    if not (results["tokens_equal"] and results["kv_bytes_equal"]):
        raise ValueError(f"moved KV is not exact: {results}")
    return results


def played(
    play: Play, sizes: Sizes, table: list[int], mover: Mover | None
) -> tuple[list[int], torch.Tensor]:
    """Return all tokens and the bytes of their KV after the turns; the slot is empty again."""
    fed, generated = sizes.turn_tokens
    log: list[int] = []
    computed = 0
    play.open(table)
    for turn in range(sizes.turns):
        log += random_tokens(play.spec, fed, seed=turn)
        for _ in range(generated):
            log.append(play.feed(computed, log[computed:], sizes.chunk))
            computed = len(log) - 1
        if mover is not None:
            table = mover(table, computed)
    play.close()
    return log, kv_bytes(play, table, computed)


def kv_bytes(play: Play, table: list[int], tokens: int) -> torch.Tensor:
    """Return the KV of the first `tokens` tokens: integers, token by token."""
    blocks = play.cache[table].view(torch.int16)  # [n, layers, 2, kv_heads, block, D]
    by_token = blocks.movedim(4, 1).flatten(0, 1)
    return by_token[:tokens].clone()
