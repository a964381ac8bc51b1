"""Blocks of the cache to and from one contiguous staging buffer: one launch, any ids.

A block's record is opaque here: it is moved as 64-bit words, and its dtype is not looked at.
"""

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import Launch, Tuning
from agentserve_kernels.tensors import check

TILE = 2048
WORD_BYTES = 8
IDS = (torch.int32, torch.int64)


def gather_reference(cache: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Do what `gather_blocks` does, with torch operations."""
    staging.copy_(cache[ids.long()])


def scatter_reference(staging: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor) -> None:
    """Do what `scatter_blocks` does, with torch operations."""
    cache[ids.long()] = staging


@triton.jit
def copy_blocks_kernel(
    cache: tl.tensor,
    ids: tl.tensor,
    staging: tl.tensor,
    words: tl.tensor,
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Move TILE words of one block."""
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < words
    block = cache + tl.load(ids + index).to(tl.int64) * words + columns
    staged = staging + index * words + columns
    if GATHER:
        tl.store(staged, tl.load(block, mask=inside), mask=inside)
    else:
        tl.store(block, tl.load(staged, mask=inside), mask=inside)


def copy_blocks_launch(
    cache: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, *, gather: bool
) -> Launch:
    """Return the launch of `gather_blocks` or `scatter_blocks`; raises as they do."""
    count = ids.shape[0]
    check("ids", ids, (count,), *IDS)
    check("cache", cache, tuple(cache.shape), cache.dtype)
    check("staging", staging, (count, *cache.shape[1:]), cache.dtype)
    size = cache[0].nbytes
    if size % WORD_BYTES:
        raise ValueError(f"blocks of {size} bytes are not whole {8 * WORD_BYTES}-bit words")
    words = size // WORD_BYTES
    arguments = {
        "cache": _words(cache),
        "ids": ids,
        "staging": _words(staging),
        "words": words,
        "GATHER": gather,
        "TILE": TILE,
    }
    grid = (count, triton.cdiv(words, TILE))
    return Launch(copy_blocks_kernel, grid, arguments, Tuning(warps=8))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int64)


def gather_blocks(cache: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy the blocks `ids` of the cache to `staging`, in that order.

    cache: [blocks, ...]; ids: int32 or int64 [n], each a block of the cache (not checked);
    staging: [n, ...] of the cache's dtype. Raises ValueError for other shapes or dtypes, and if a
    block is not a multiple of 8 bytes.
    """
    copy_blocks_launch(cache, ids, staging, gather=True).run()


def scatter_blocks(staging: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor) -> None:
    """Copy `staging` to the blocks `ids` of the cache; the reverse of `gather_blocks`.

    No id may occur twice (not checked).
    """
    copy_blocks_launch(cache, ids, staging, gather=False).run()
