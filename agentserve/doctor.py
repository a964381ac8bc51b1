"""Whether and how a model would run here, found out without loading it and without torch."""

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec

from agentserve import __version__
from agentserve.config import cache_directory
from agentserve.engine.process import usable_cores
from agentserve.model.build import BLOCK_SIZE
from agentserve.model.memory import FEWEST_TOKENS, device_share, free_memory, host_share
from agentserve.model.prepare import Progress, prepare
from agentserve.model.spec import ModelSpec, load_spec

ABILITIES = ("f16c", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
LIBRARIES = ("torch", "triton", "numba", "transformers", "tokenizers", "xgrammar", "gguf")
ITEM_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4}


class Machine(msgspec.Struct, frozen=True):
    """What the engine has to work with. Memory in bytes."""

    cpu: str
    abilities: list[str]
    cores: int
    memory: int
    memory_free: int
    cache_directory: str
    versions: dict[str, str]


class Figures(msgspec.Struct, frozen=True):
    """What a model takes. Sizes in bytes.

    `kv_tokens` is what fits beside the weights, `host_tokens` what the host tier holds besides.
    """

    architecture: str
    parameters: int
    dtype: str
    weight_bytes: int
    kv_token_bytes: int
    kv_tokens: int
    host_tokens: int
    max_context: int


class Report(msgspec.Struct, frozen=True):
    """The answer of `agentserve doctor`; `reason` is empty when the model runs."""

    model: str
    runs: bool
    reason: str
    figures: Figures | None
    tool_format: str | None
    warnings: list[str]
    machine: Machine


def examine(
    model: str,
    dtype: str = "auto",
    kv_bytes: int = 0,
    host_bytes: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Prepare `model` as serving it would, and judge it.

    kv_bytes, host_bytes: as in config.ModelSettings; 0 and None take the shares of free memory that
    the engine takes.
    """
    from agentserve.assembly import load_text  # it takes long to load, and `versions` needs none

    machine = inspect_machine()
    figures: Figures | None = None
    try:
        directory = prepare(model, progress)
        spec = load_spec(directory)
        check_weight_files(directory)
        figures = estimate(spec, dtype, machine.memory_free, kv_bytes, host_bytes)
        text = load_text(directory, model)
        check_memory(figures, machine.memory_free)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split()).removeprefix(model).lstrip(": ")
        return Report(model, False, reason, figures, None, [], machine)
    warnings = list(text.composer.warnings)
    if figures.kv_tokens < figures.max_context:
        warnings.append(f"a session can use {figures.kv_tokens} of {figures.max_context} tokens")
    return Report(model, True, "", figures, text.format.name, warnings, machine)


def estimate(
    spec: ModelSpec, dtype: str, memory_free: int, kv_bytes: int = 0, host_bytes: int | None = None
) -> Figures:
    """Return what a model takes in `dtype` with `memory_free` bytes free before it is loaded."""
    item = ITEM_BYTES[dtype]
    parameters = count_parameters(spec)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * item
    left = max(0, memory_free - parameters * item)
    device = kv_bytes or device_share(left)
    host = host_share(left - device) if host_bytes is None else host_bytes
    record = token_bytes * BLOCK_SIZE
    return Figures(
        architecture=spec.architecture,
        parameters=parameters,
        dtype="float32" if dtype == "float32" else "bfloat16",
        weight_bytes=parameters * item,
        kv_token_bytes=token_bytes,
        kv_tokens=device // record * BLOCK_SIZE,
        host_tokens=host // record * BLOCK_SIZE,
        max_context=spec.max_context,
    )


def count_parameters(spec: ModelSpec) -> int:
    """Return how many numbers the model's tensors hold."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.inner_size
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner + 2 * hidden
    layer += spec.qkv_bias * (queries + 2 * keys) + spec.output_bias * hidden
    layer += spec.mlp_bias * (2 * inner + hidden) + spec.head_norm * 2 * spec.head_dim
    embeddings = spec.vocab_size * hidden * (1 if spec.tied_embeddings else 2)
    return spec.layers * layer + embeddings + hidden


def check_weight_files(directory: Path) -> None:
    """Raise FileNotFoundError that names the first file of weights that is missing."""
    index = directory / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
    for name in sorted(names):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} has no {name}")


def check_memory(figures: Figures, memory_free: int) -> None:
    """Raise ValueError when the weights and a least amount of KV do not fit."""
    least = figures.weight_bytes + FEWEST_TOKENS * figures.kv_token_bytes
    if least > memory_free or figures.kv_tokens < FEWEST_TOKENS:
        raise ValueError(
            f"memory is too small: weights and KV need at least {least} bytes, "
            f"{memory_free} are free"
        )


def inspect_machine() -> Machine:
    """Return what this machine offers; what it does not tell is empty or 0."""
    facts = _cpu_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return Machine(
        cpu=facts.get("model name", platform.processor() or platform.machine()),
        abilities=[name for name in ABILITIES if name in flags],
        cores=usable_cores(),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_free=free_memory(),
        cache_directory=str(cache_directory()),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Return the versions of agentserve and of what it stands on, importing none of it."""
    found = {"agentserve": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu_facts() -> dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo, nothing where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
