"""What this machine reaches: memory reads, matrix products by rows, attention; by every method.

`measure_rates` is called once a run and its result handed on. Weights and KV are cold: the calls go
round over more memory than any cache holds, so whatever a cache keeps of such a round is in the
rates. A rate is the best of a few rounds.
"""

import itertools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentserve.model.build import prepare_environment
from agentserve.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

COLD_BYTES = 256 << 20
OUTER, INNER = 4096, 1024  # of each weight matrix
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BLOCK = 16  # tokens
PREFILLS = ((175, 3500), (512, 4096))  # (new, cached)
DECODES = ((1, 4096), (8, 3500), (16, 3500))  # (sequences, context)
BUDGET_S = 0.3
ROUNDS = 3


class Product(msgspec.Struct, frozen=True):
    """x @ weight.T with x of `rows` rows and cold weights."""

    method: str
    rows: int
    flops_per_s: float
    weight_bytes_per_s: float


class Attention(msgspec.Struct, frozen=True):
    """Attention over paged, cold KV: `new` tokens in each of `sequences`, after `cached` ones.

    The FLOPs are those of the two products under a causal mask.
    """

    method: str
    sequences: int
    new: int
    cached: int
    flops_per_s: float
    kv_bytes_per_s: float


class Rates(msgspec.Struct, frozen=True):
    """Everything measured; `memory` is bytes/s of plain reads by method."""

    memory: dict[str, float]
    products: list[Product]
    attention: list[Attention]

    @property
    def memory_bytes_per_s(self) -> float:
        """The fastest that anything read cold memory."""
        read = [*self.memory.values(), *(product.weight_bytes_per_s for product in self.products)]
        return max(read + [attention.kv_bytes_per_s for attention in self.attention])

    @property
    def flops_per_s(self) -> float:
        """The fastest that anything multiplied."""
        rates = [*self.products, *self.attention]
        return max(rate.flops_per_s for rate in rates)


def measure_rates(spec: ModelSpec) -> Rates:
    """Measure all of it for the head shapes of a model; takes about half a minute."""
    prepare_environment(0)
    return Rates(
        memory=memory_rates(),
        products=product_rates(),
        attention=[
            *(prefill_attention(spec, new, cached) for new, cached in PREFILLS),
            *(sdpa(spec, new, cached) for new, cached in PREFILLS),
            *(decode_attention(spec, sequences, context) for sequences, context in DECODES),
        ],
    )


def best_seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call, in the best of a few rounds; one call when that takes long."""
    call()  # compiles, allocates
    best = float("inf")
    for _ in range(ROUNDS):
        start, calls, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < BUDGET_S / ROUNDS:
            call()
            calls += 1
            elapsed = time.perf_counter() - start
        best = min(best, elapsed / calls)
        if best > BUDGET_S:
            break
    return best


def memory_rate() -> float:
    """Return the best bytes/s at which all threads together read a large array."""
    return max(memory_rates().values())


def memory_rates() -> dict[str, float]:
    """Return the bytes/s of plain reads, by method."""
    import torch
    from numba import njit, prange

    @njit(parallel=True, nogil=True)
    def add_up(data: Any, parts: int) -> Any:
        total = 0
        size = data.size // parts
        for part in prange(parts):
            own = 0
            for i in range(part * size, (part + 1) * size):
                own += data[i]
            total += own
        return total

    words = np.ones(COLD_BYTES // 8, np.int64)
    numbers = torch.ones(COLD_BYTES // 4)
    threads = len(os.sched_getaffinity(0))
    return {
        "torch sum": COLD_BYTES / best_seconds(numbers.sum),
        "numba sum": COLD_BYTES / best_seconds(lambda: add_up(words, threads)),
    }


def product_rates(rows: tuple[int, ...] = ROWS) -> list[Product]:
    """Return the rates of every method of a matrix product, by rows."""
    import torch

    measured = []
    for dtype in (torch.float32, torch.bfloat16):
        count = COLD_BYTES // (OUTER * INNER * dtype.itemsize)
        weights = [torch.full((OUTER, INNER), 0.01, dtype=dtype) for _ in range(count)]
        for name, make in PRODUCTS[str(dtype)].items():
            make_call = make(weights)
            for many in rows:
                seconds = best_seconds(make_call(many))
                size = OUTER * INNER
                measured.append(
                    Product(
                        method=f"{name} {str(dtype).removeprefix('torch.')}",
                        rows=many,
                        flops_per_s=2 * many * size / seconds,
                        weight_bytes_per_s=size * dtype.itemsize / seconds,
                    )
                )
    return measured


MakeCall = Callable[[int], Callable[[], object]]  # for so many rows


def _torch(weights: "list[torch.Tensor]") -> MakeCall:
    import torch

    turn, dtype = itertools.cycle(weights), weights[0].dtype

    def make(rows: int) -> Callable[[], object]:
        x, out = torch.ones(rows, INNER, dtype=dtype), torch.empty(rows, OUTER, dtype=dtype)
        return lambda: torch.mm(x, next(turn).T, out=out)

    return make


def _numpy(weights: "list[torch.Tensor]") -> MakeCall:
    turn = itertools.cycle([weight.numpy() for weight in weights])

    def make(rows: int) -> Callable[[], object]:
        x, out = np.ones((rows, INNER), np.float32), np.empty((rows, OUTER), np.float32)
        return lambda: np.matmul(x, next(turn).T, out=out)

    return make


def _kernels(weights: "list[torch.Tensor]") -> MakeCall:
    import torch
    from agentserve_kernels.linear import linear, pack

    turn = itertools.cycle([pack(weight) for weight in weights])

    def make(rows: int) -> Callable[[], object]:
        x, out = torch.ones(rows, INNER), torch.empty(rows, OUTER)
        return lambda: linear(x, next(turn), None, out)

    return make


PRODUCTS = {
    "torch.float32": {"torch": _torch, "numpy": _numpy, "kernels": _kernels},
    "torch.bfloat16": {"torch": _torch, "kernels": _kernels},
}


def attention_flops(spec: ModelSpec, new: int, cached: int) -> int:
    """Return the FLOPs of one layer's attention of `new` tokens after `cached` ones, causal."""
    keys = new * cached + new * (new + 1) // 2
    return 4 * spec.heads * spec.head_dim * keys


def kv_layer_bytes(spec: ModelSpec, tokens: int, item_bytes: int = 2) -> int:
    """Return the bytes of one layer's keys and values."""
    return 2 * spec.kv_heads * spec.head_dim * item_bytes * tokens


def prefill_attention(spec: ModelSpec, new: int, cached: int) -> Attention:
    """Measure a chunk of one sequence with the runtime's own kernel."""
    import torch
    from agentserve_kernels.tensors import Chunk, DecodeRows

    nobody = DecodeRows(*(torch.empty(0, dtype=torch.int64) for _ in range(3)))
    chunk = Chunk(0, 0, cached, new)
    seconds = _attention_seconds(spec, _pages(spec, 1, cached + new), new, nobody, chunk)
    return _attention("kernels bfloat16", spec, (1, new, cached), seconds)


def sdpa(spec: ModelSpec, new: int, cached: int) -> Attention:
    """Measure torch's scaled_dot_product_attention on a chunk whose KV lies in one piece."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    query = torch.rand(1, spec.heads, new, spec.head_dim)
    keys, values = torch.rand(2, 1, spec.kv_heads, cached + new, spec.head_dim)
    mask = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
    seconds = best_seconds(
        lambda: scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
    )
    measured = _attention("SDPA float32", spec, (1, new, cached), seconds)
    return msgspec.structs.replace(measured, kv_bytes_per_s=0.0)  # its KV is not cold


def decode_attention(spec: ModelSpec, sequences: int, context: int) -> Attention:
    """Measure one token in each sequence with the runtime's own kernel."""
    import torch
    from agentserve_kernels.tensors import DecodeRows

    every = torch.arange(sequences)
    rows = DecodeRows(every, every, torch.full((sequences,), context))
    seconds = _attention_seconds(spec, _pages(spec, sequences, context), sequences, rows)
    return _attention("kernels bfloat16", spec, (sequences, 1, context - 1), seconds)


def _attention_seconds(
    spec: ModelSpec, pages: list[Any], tokens: int, rows: Any, *chunks: Any
) -> float:
    """Return the least time of one layer's attention; the layers take turns."""
    import torch
    from agentserve_kernels.paged_attention import paged_attention
    from agentserve_kernels.tensors import Workspace

    query = torch.rand(tokens, spec.heads, spec.head_dim)
    out, workspace, turn = torch.empty_like(query), Workspace(), itertools.cycle(pages)
    return best_seconds(lambda: paged_attention(query, next(turn), rows, chunks, out, workspace))


def _attention(
    method: str, spec: ModelSpec, shape: tuple[int, int, int], seconds: float
) -> Attention:
    sequences, new, cached = shape
    flops = sequences * attention_flops(spec, new, cached)
    read = sequences * kv_layer_bytes(spec, cached + new)
    return Attention(method, *shape, flops_per_s=flops / seconds, kv_bytes_per_s=read / seconds)


def _pages(spec: ModelSpec, sequences: int, context: int) -> list[Any]:
    """Return the layers of a bfloat16 cache of at least COLD_BYTES, or of the model's depth."""
    import torch
    from agentserve_kernels.tensors import Pages

    blocks = -(-context // BLOCK)
    record = kv_layer_bytes(spec, BLOCK)
    layers = min(spec.layers, -(-COLD_BYTES // (sequences * blocks * record)))
    block = torch.rand(layers, 2, spec.kv_heads, BLOCK, spec.head_dim).bfloat16()
    cache = block.repeat(sequences * blocks, 1, 1, 1, 1, 1)
    # Neighbours in a sequence are not neighbours in memory.
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(1))
    tables = order.to(torch.int32).view(sequences, blocks)
    return [Pages(cache, layer, tables) for layer in range(layers)]
