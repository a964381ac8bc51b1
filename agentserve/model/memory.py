"""How many blocks of KV each tier gets: what was asked for, else a share of the memory left."""

import os
from pathlib import Path

from agentserve.config import ModelSettings

FEWEST_TOKENS = 64  # of KV; a smaller cache is a mistake
MOST_KV = 3 << 30  # bytes, unless kv_bytes asks for more
MOST_HOST = 2 << 30  # bytes, unless host_bytes asks for more
GPU_SPARE = 2 << 30  # bytes: activations, graphs, workspaces, what the allocator keeps


def free_memory() -> int:
    """Return the bytes of memory that can be taken without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def device_share(free: int) -> int:
    """Return the bytes of device KV when nobody asks, with `free` bytes free beside the weights."""
    return min(MOST_KV, free * 2 // 5)


def host_share(free: int) -> int:
    """Return the bytes of host KV when nobody asks, with `free` bytes free beside the device KV.

    On the CPU both tiers are the same DRAM, which other programs want as well.
    """
    return min(MOST_HOST, max(0, free) // 5)


def gpu_share(free: int) -> int:
    """Return the bytes of a GPU's KV when nobody asks, with `free` bytes free beside the weights.

    A GPU is there for this.
    """
    return max(0, free - GPU_SPARE) * 9 // 10


def pinned_share(free: int) -> int:
    """Return the bytes of host KV beside a GPU when nobody asks: it is page-locked at the start."""
    return max(0, free) * 2 // 5


def tier_blocks(
    settings: ModelSettings, record: int, block_size: int, gpu_free: int | None = None
) -> tuple[int, int]:
    """Return the blocks of the device and of the host tier, for records of `record` bytes.

    gpu_free: bytes free on the GPU that is the device; None: the device is the CPU.
    Raises ValueError for settings that hold too little.
    """
    free, least = free_memory(), -(-FEWEST_TOKENS // block_size)
    share = device_share(free) if gpu_free is None else gpu_share(gpu_free)
    kv_bytes = settings.kv_bytes or share
    host_bytes = settings.host_bytes
    if host_bytes is None:
        host_bytes = host_share(free - kv_bytes) if gpu_free is None else pinned_share(free)
    elif 0 < host_bytes < record or host_bytes < 0:
        raise ValueError(f"host_bytes={host_bytes} holds no block of {record} bytes; 0 is no tier")
    if kv_bytes // record < least:
        raise ValueError(
            f"kv_bytes={kv_bytes} holds {kv_bytes // record} blocks, fewer than {least}: "
            f"the device's KV (--kv-device) needs {least * record} bytes"
        )
    if gpu_free is not None and kv_bytes > gpu_free:
        raise ValueError(f"kv_bytes={kv_bytes} is more than the {gpu_free} bytes that are free")
    return kv_bytes // record, host_bytes // record
