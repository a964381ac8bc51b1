"""The factory of the torch runner, reached by dotted name; sets what must be set before torch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentserve.config import OPENMP_WAITING, ModelSettings, cache_directory
from agentserve.engine.plan import (
    Row,
    SamplingParams,
    SlotAdd,
    SlotDrop,
    StepPlan,
    TableAppend,
    pack,
)
from agentserve.model.spec import ModelSpec, load_spec

if TYPE_CHECKING:
    from agentserve.engine.compiler import CompilerProcess
    from agentserve.model.runner import TorchRunner

BLOCK_SIZE = 32  # tokens; half of a block is unused at the end of each sequence (DECISIONS.md, 19)
FEWEST_TOKENS = 64  # of KV; a smaller cache is a mistake
MOST_KV = 3 << 30  # bytes, unless kv_bytes asks for more
MOST_HOST = 2 << 30  # bytes, unless host_bytes asks for more


def build_torch(options: dict[str, Any]) -> "tuple[TorchRunner, CompilerProcess]":
    """Load a prepared model and return its runner and its grammar compiler.

    `options` are `config.ModelSettings`. Raises UnsupportedModel before any weights are read,
    WeightsError when tensors do not fit the config, ValueError for bad settings.
    """
    runner = load_runner(options)
    from agentserve.model.grammar import grammar_compiler

    settings = msgspec.convert(options, ModelSettings)
    compiler = grammar_compiler(
        settings.directory, runner.info.vocab_size, settings.grammar_bytes, settings.grammar_cpu_s
    )
    compiler.start()
    return runner, compiler


def load_runner(options: dict[str, Any]) -> "TorchRunner":
    """Return the runner alone; see `build_torch`."""
    settings = msgspec.convert(options, ModelSettings)
    directory = Path(settings.directory)
    spec = load_spec(directory)
    prepare_environment(settings.threads)
    return _load(directory, spec, settings)


def prepare_environment(threads: int) -> None:
    """Set OpenMP's and numba's variables where the parent has not; before torch is imported."""
    for name, value in OPENMP_WAITING.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory() / "numba"))
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


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


def _load(directory: Path, spec: ModelSpec, settings: ModelSettings) -> "TorchRunner":
    import numba
    import torch

    from agentserve.model.decoder import Decoder, block_bytes, empty_cache
    from agentserve.model.runner import TorchRunner, model_identity
    from agentserve.model.weights import load_weights, storage_dtype

    if settings.threads:
        torch.set_num_threads(settings.threads)
        numba.set_num_threads(min(settings.threads, numba.config.NUMBA_NUM_THREADS))
    dtype = storage_dtype(settings.dtype)
    weights = load_weights(directory, spec, dtype)
    block_size = settings.block_size or BLOCK_SIZE
    record = block_bytes(spec, block_size, dtype)
    num_blocks, host_blocks = _tier_blocks(settings, record, -(-FEWEST_TOKENS // block_size))
    decoder = Decoder(spec, weights, empty_cache(spec, num_blocks, block_size, dtype))
    runner = TorchRunner(
        decoder,
        model=directory.name,
        identity=model_identity(directory, dtype),
        max_slots=settings.max_slots,
        host_blocks=host_blocks,
    )
    _compile(runner)
    return runner


def _tier_blocks(settings: ModelSettings, record: int, least: int) -> tuple[int, int]:
    """Return the blocks of the device and of the host tier, for records of `record` bytes."""
    free = free_memory()
    kv_bytes = settings.kv_bytes or device_share(free)
    host_bytes = settings.host_bytes
    if host_bytes is None:
        host_bytes = host_share(free - kv_bytes)
    elif 0 < host_bytes < record or host_bytes < 0:
        raise ValueError(f"host_bytes={host_bytes} holds no block of {record} bytes; 0 is no tier")
    if kv_bytes // record < least:
        raise ValueError(
            f"kv_bytes={kv_bytes} holds {kv_bytes // record} blocks, fewer than {least}: "
            f"the device's KV (--kv-device) needs {least * record} bytes"
        )
    return kv_bytes // record, host_bytes // record


def _compile(runner: "TorchRunner") -> None:
    """Run a token: one call leads to all kernels, and compiles them before the engine is ready.

    The first time on a machine this takes about 40 s; later ones load the compiled code. The KV
    that it leaves belongs to no sequence.
    """
    opened = SlotAdd(0, 0, SamplingParams(), 0)
    table = TableAppend(0, 0, [0])
    for plan in (
        StepPlan(0, [], [opened], [table], [], [Row(0, 0, 1, True)], pack([0])),
        StepPlan(1, [SlotDrop(0, 0)], [], [], [], [], b""),
    ):
        runner.collect(runner.launch(plan))
