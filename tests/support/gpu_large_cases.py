"""GPU kernels at element offsets that no int32 holds, in Triton's interpreter.

    TRITON_INTERPRET=1 python gpu_large_cases.py

Cache and tables have more than 2^31 elements each; only what is touched gets memory. Prints a JSON
object: the outcome of each case, and the bytes that the process has come to occupy.
"""

import json
import math
import mmap
import re
import traceback
from pathlib import Path

import torch
from agentserve_kernels.gpu.blocks import gather_blocks, scatter_blocks
from agentserve_kernels.gpu.kv_write import kv_write
from agentserve_kernels.gpu.paged_attention import Spans, paged_attention
from agentserve_kernels.gpu.paged_decode import SplitPlan, paged_decode
from agentserve_kernels.tensors import DecodeRows, Pages, Placement, Rotary, Workspace
from gpu_attention_cases import indices
from gpu_row_cases import normal

SHAPE = (1, 2, 1, 16, 64)  # of a block: 2^11 elements, 2^9 words of 64 bits
FAR, FARTHER = [2**20 + 3, 2**20 + 1], [2**22 + 3, 2**22 + 1]  # ids of blocks
SLOT, WIDTH = 2**15 + 1, 2**16
NEAR = torch.tensor([1, 0])
MAP_NORESERVE = 0x4000  # not in the module before Python 3.13


def reserved(shape, dtype):
    """A tensor that gets memory where it is touched, on a machine of any size."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def large(ids):
    """Pages whose last slot's table names blocks far out, and the same with small numbers."""
    cache = reserved((max(ids) + 1, *SHAPE), torch.float16)
    tables = reserved((SLOT + 1, WIDTH), torch.int32)
    tables[SLOT, :2] = torch.tensor(ids)
    cache[ids] = normal("cpu", 2, *SHAPE, dtype=torch.float16)
    small = Pages(cache[ids][[1, 0]], 0, NEAR[None].int())
    assert cache.numel() > 2**31 < tables.numel()
    return Pages(cache, 0, tables), small


def both(run, ids=FAR):
    """`run(pages, slot, blocks)` gives the same with large numbers and with small ones."""
    pages, small = large(ids)
    got, expected = run(pages, SLOT, torch.tensor(ids)), run(small, 0, NEAR)
    assert torch.equal(got, expected)
    assert expected.abs().max() > 0


def paged_attention_reads_far_blocks():
    def run(pages, slot, blocks):
        query, out = normal("cpu", 3, 2, 64), torch.zeros(3, 2, 64)
        paged_attention(query, pages, Spans(*indices("cpu", [0], [3], [slot], [20]), 3), out)
        return out

    both(run)


def paged_decode_reads_far_blocks():
    def run(pages, slot, blocks):
        query, out = normal("cpu", 1, 2, 64), torch.zeros(1, 2, 64)
        decode = DecodeRows(*indices("cpu", [0], [slot], [20]))
        paged_decode(query, pages, decode, out, SplitPlan(2, 128), Workspace())
        return out

    both(run)


def kv_write_writes_far_blocks():
    def run(pages, slot, blocks):
        qkv, query = normal("cpu", 2, 3 * 64, seed=5), torch.zeros(2, 1, 64)
        angles = normal("cpu", 32, 32)
        place = Placement(torch.tensor([4, 21]), blocks)
        kv_write(qkv, pages, place, Rotary(angles.cos(), angles.sin()), None, query)
        return pages.cache[blocks]

    both(run)


def block_copies_reach_far_blocks():
    def run(pages, slot, blocks):
        staging = torch.zeros((2, *SHAPE), dtype=torch.float16)
        gather_blocks(pages.cache, blocks, staging)
        scatter_blocks(staging + 1, pages.cache, blocks.int())
        return torch.cat((staging, pages.cache[blocks]))

    both(run, FARTHER)


CASES = (
    paged_attention_reads_far_blocks,
    paged_decode_reads_far_blocks,
    kv_write_writes_far_blocks,
    block_copies_reach_far_blocks,
)


def most_memory():
    """The most bytes that this process held at a time.

    Not from getrusage, which on Linux counts those of the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024


def outcome(case):
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return "passed"


if __name__ == "__main__":
    outcomes = {case.__name__: outcome(case) for case in CASES}
    print(json.dumps({"cases": outcomes, "occupied_bytes": most_memory()}))
