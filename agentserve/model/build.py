"""The factory of the runners, reached by dotted name; sets what must be set before torch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentserve.config import OPENMP_WAITING, ModelSettings, kernel_cache
from agentserve.engine.plan import (
    Row,
    SamplingParams,
    SlotAdd,
    SlotDrop,
    StepPlan,
    TableAppend,
    pack,
)
from agentserve.model.memory import tier_blocks
from agentserve.model.spec import ModelSpec, load_spec

if TYPE_CHECKING:
    from agentserve.engine.compiler import CompilerProcess
    from agentserve.model.gpu_runner import GpuRunner
    from agentserve.model.runner import TorchRunner

    AnyRunner = TorchRunner | GpuRunner

BLOCK_SIZE = 32  # tokens; half of a block is unused at the end of each sequence (DECISIONS.md, 19)
GPU_BLOCK_SIZE = 16  # tokens: a record of an 8B model is about 2 MB
CAPABILITY = (8, 0)  # of a GPU, at least: bfloat16 products and asynchronous copies


def build_torch(options: dict[str, Any]) -> "tuple[AnyRunner, CompilerProcess]":
    """Load a prepared model and return its runner and its grammar compiler.

    `options` are `config.ModelSettings`. Raises UnsupportedModel before any weights are read,
    WeightsError when tensors do not fit the config, ValueError for bad settings or without the
    device that they name.
    """
    runner = load_runner(options)
    from agentserve.model.grammar import grammar_compiler

    settings = msgspec.convert(options, ModelSettings)
    compiler = grammar_compiler(
        settings.directory, runner.info.vocab_size, settings.grammar_bytes, settings.grammar_cpu_s
    )
    compiler.start()
    return runner, compiler


def load_runner(options: dict[str, Any]) -> "AnyRunner":
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
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache()))
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def chosen_device(name: str) -> str:
    """Return "cpu" or "cuda" for a setting that may also be "auto".

    Raises ValueError when "cuda" is asked for where there is no GPU that can be used.
    """
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda")
    if name == "cpu":
        return name
    reason = ""
    if not torch.cuda.is_available():
        reason = f"torch {torch.__version__} finds no CUDA device on this machine"
    elif (found := torch.cuda.get_device_capability()) < CAPABILITY:
        reason = (
            f"compute capability {found[0]}.{found[1]} is below {CAPABILITY[0]}.{CAPABILITY[1]}"
        )
    if reason and name == "cuda":
        raise ValueError(f"device cuda: {reason}; use --device cpu, or auto")
    return "cpu" if reason else "cuda"


def _load(directory: Path, spec: ModelSpec, settings: ModelSettings) -> "AnyRunner":
    load = _load_gpu if chosen_device(settings.device) == "cuda" else _load_cpu
    runner: AnyRunner = load(directory, spec, settings)
    warm_up(runner)
    return runner


def _load_cpu(directory: Path, spec: ModelSpec, settings: ModelSettings) -> "TorchRunner":
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
    num_blocks, host_blocks = tier_blocks(settings, record, block_size)
    return TorchRunner(
        Decoder(spec, weights, empty_cache(spec, num_blocks, block_size, dtype)),
        model=directory.name,
        identity=model_identity(directory, dtype),
        max_slots=settings.max_slots,
        host_blocks=host_blocks,
    )


def _load_gpu(directory: Path, spec: ModelSpec, settings: ModelSettings) -> "GpuRunner":
    import torch

    from agentserve.model.decoder import Decoder, block_bytes, empty_cache
    from agentserve.model.gpu_runner import GpuRunner
    from agentserve.model.runner import model_identity
    from agentserve.model.weights import load_weights, storage_dtype

    device = f"cuda:{torch.cuda.current_device()}"
    dtype = storage_dtype(settings.dtype)
    weights = load_weights(directory, spec, dtype, device)
    block_size = settings.block_size or GPU_BLOCK_SIZE
    record = block_bytes(spec, block_size, dtype)
    free, _ = torch.cuda.mem_get_info(device)
    num_blocks, host_blocks = tier_blocks(settings, record, block_size, free)
    return GpuRunner(
        Decoder(spec, weights, empty_cache(spec, num_blocks, block_size, dtype, device)),
        model=directory.name,
        identity=model_identity(directory, dtype),
        max_slots=settings.max_slots,
        host_blocks=host_blocks,
        graphs=settings.cuda_graphs,
    )


def warm_up(runner: "AnyRunner") -> None:
    """Run a chunk and a token in every form of sampling, which compiles all kernels.

    The first time on a machine this takes about 40 s; later ones load the compiled code. The KV
    that it leaves belongs to no sequence.
    """
    every_token = pack([-1] * -(-runner.info.vocab_size // 32))
    penalised = SamplingParams(temperature=1.0, repetition_penalty=1.1)
    opened = [TableAppend(0, 0, [0])]
    chunk, token = Row(0, 0, 2, True), Row(0, 2, 1, True)
    for generation, params in enumerate((SamplingParams(), penalised)):
        added = [SlotAdd(0, generation, params, 0)]
        for plan, masks in (
            (StepPlan(0, [], added, opened, [], [chunk], pack([0, 0])), {}),
            (StepPlan(1, [], [], [], [], [token], pack([0])), {0: every_token}),
            (StepPlan(2, [SlotDrop(0, generation)], [], [], [], [], b""), {}),
        ):
            handle: Any = runner.launch(plan)
            runner.sample(handle, masks)
            runner.collect(handle)
