"""Launches of every GPU kernel at the shapes of real models, on tensors without memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from agentserve_kernels.gpu.activation import silu_mul_launch
from agentserve_kernels.gpu.blocks import copy_blocks_launch
from agentserve_kernels.gpu.kv_write import kv_write_launch
from agentserve_kernels.gpu.launch import Launch
from agentserve_kernels.gpu.norm import add_rms_norm_launch
from agentserve_kernels.gpu.paged_attention import Spans, paged_attention_launch
from agentserve_kernels.gpu.paged_decode import SplitPlan, paged_decode_launches
from agentserve_kernels.gpu.sampling import sample_launch
from agentserve_kernels.gpu.sampling_rows import DTYPES, SamplingRows
from agentserve_kernels.tensors import (
    DecodeRows,
    HeadNorm,
    Pages,
    Placement,
    Rotary,
    Workspace,
)

ROWS, BLOCKS, BLOCK_TOKENS, WINDOW = 64, 1024, 16, 4096
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and their size."""

    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.dim}"


SMOLLM2, LLAMA_1B, QWEN3_8B = Heads(9, 3, 64), Heads(32, 8, 64), Heads(32, 8, 128)


@dataclass(frozen=True)
class Case:
    """A kernel at one shape. `make` returns its launch."""

    kernel: str
    shape: str
    make: Callable[[], Launch]


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def lists(count: int, names: int) -> list[torch.Tensor]:
    return [meta(count, dtype=torch.int64) for _ in range(names)]


def pages(heads: Heads, dtype: torch.dtype) -> Pages:
    cache = meta(BLOCKS, 32, 2, heads.kv_heads, BLOCK_TOKENS, heads.dim, dtype=dtype)
    return Pages(cache, 7, meta(ROWS, 4096, dtype=torch.int32))


def attention(heads: Heads, dtype: torch.dtype, window: int) -> Launch:
    query = meta(ROWS, heads.heads, heads.dim, dtype=dtype)
    spans = Spans(*lists(4, 4), ROWS)
    return paged_attention_launch(query, pages(heads, dtype), spans, query, window)


def decode(heads: Heads, dtype: torch.dtype, window: int, splits: int) -> list[Launch]:
    query = meta(ROWS, heads.heads, heads.dim, dtype=dtype)
    rows = DecodeRows(*lists(ROWS, 3))
    plan = SplitPlan(splits, 512)
    return paged_decode_launches(
        query, pages(heads, dtype), rows, query, plan, Workspace("meta"), window
    )


def kv_write(heads: Heads, dtype: torch.dtype, normed: bool) -> Launch:
    width = (heads.heads + 2 * heads.kv_heads) * heads.dim
    angles = meta(8192, heads.dim // 2)
    return kv_write_launch(
        meta(ROWS, width, dtype=dtype),
        pages(heads, dtype),
        Placement(*lists(ROWS, 2)),
        Rotary(angles, angles),
        HeadNorm(meta(heads.dim), meta(heads.dim), 1e-6) if normed else None,
        meta(ROWS, heads.heads, heads.dim, dtype=dtype),
    )


def norm(hidden: int, added: bool) -> Launch:
    rows = meta(ROWS, hidden, dtype=BF16)
    return add_rms_norm_launch(
        meta(ROWS, hidden), rows if added else None, meta(hidden), 1e-6, rows
    )


def silu(inner: int) -> Launch:
    return silu_mul_launch(meta(ROWS, 2 * inner, dtype=BF16), meta(ROWS, inner, dtype=BF16))


def copy(gather: bool) -> Launch:
    cache = pages(QWEN3_8B, BF16).cache
    ids = meta(256, dtype=torch.int64)
    return copy_blocks_launch(cache, ids, meta(256, *cache.shape[1:], dtype=BF16), gather=gather)


def sampling(vocab: int, dtype: torch.dtype, added: bool) -> Launch:
    rows = SamplingRows(**{name: meta(ROWS, dtype=kind) for name, kind in DTYPES.items()})
    return sample_launch(
        meta(ROWS, vocab, dtype=dtype),
        rows,
        meta(ROWS, dtype=torch.int32),
        meta(ROWS, dtype=torch.bool),
        meta(ROWS, vocab) if added else None,
        meta(ROWS, -(-vocab // 32), dtype=torch.int32) if added else None,
    )


def cases() -> Iterator[Case]:
    """Return every kernel in every variant that a constant of it selects."""
    for heads in (LLAMA_1B, QWEN3_8B, SMOLLM2):
        yield from head_cases(heads)
    for hidden in (576, 4096, 8192):
        for added in (True, False):
            shape = f"{hidden} wide" + ", residual" * added
            yield Case("add_rms_norm", shape, lambda h=hidden, a=added: norm(h, a))
    for inner in (1536, 12288):
        yield Case("silu_mul", f"{inner} wide", lambda i=inner: silu(i))
    yield Case("gather_blocks", str(QWEN3_8B), lambda: copy(True))
    yield Case("scatter_blocks", str(QWEN3_8B), lambda: copy(False))
    for vocab, dtype in ((49152, FP32), (151936, FP32), (151936, BF16)):
        for added in (False, True):
            shape = f"{vocab} tokens, {name(dtype)}" + ", penalties and mask" * added
            yield Case("sample", shape, lambda v=vocab, d=dtype, a=added: sampling(v, d, a))


def head_cases(heads: Heads) -> Iterator[Case]:
    for dtype, window in ((BF16, 0), (BF16, WINDOW), (FP16, 0), (FP32, 0), (FP32, WINDOW)):
        shape = f"{heads}, {name(dtype)}" + f", window {window}" * bool(window)
        yield Case("paged_attention", shape, lambda d=dtype, w=window: attention(heads, d, w))
        yield Case("paged_decode", shape, lambda d=dtype, w=window: decode(heads, d, w, 8)[0])
    yield Case("paged_decode", f"{heads}, bf16, one split", lambda: decode(heads, BF16, 0, 1)[0])
    yield Case("join_splits", f"{heads}, bf16", lambda: decode(heads, BF16, 0, 8)[1])
    for dtype, normed in ((BF16, False), (BF16, True), (FP32, True)):
        shape = f"{heads}, {name(dtype)}" + ", QK-norm" * normed
        yield Case("kv_write", shape, lambda d=dtype, n=normed: kv_write(heads, d, n))


def name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
