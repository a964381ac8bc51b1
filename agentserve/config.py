"""Settings, each with its default and unit; unknown keys are errors."""

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

import msgspec

GRAMMAR_BYTES = 512 * 1024 * 1024
GRAMMAR_CPU_S = 2.0


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler may do in a step and how much may wait."""

    token_budget: int = 0  # tokens computed in one step, decodes included; 0 is the runner's own
    max_waiting: int = 512  # turns that wait for admission; more are refused as overloaded
    kv_policy: str = "tool-aware"  # none | device-lru | lru+host | tool-aware
    grammar_s: float = 30.0  # a grammar that takes longer to compile, on a busy machine, is refused
    grammar_cache_bytes: int = 256 * 1024 * 1024  # of compiled grammars
    check_invariants: bool = False  # after every step; for tests and debugging


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, and the memory and threads that it may use."""

    directory: str  # prepared by `model.prepare`: config.json, tokenizer.json, model.safetensors
    device: str = "auto"  # auto | cpu | cuda; auto is CUDA where a GPU can be used
    dtype: str = "auto"  # auto | float32 | bfloat16
    kv_bytes: int = 0  # device KV; 0 takes a share of the free memory
    host_bytes: int | None = None  # host KV; None takes a share of the free memory, 0 is no tier
    block_size: int = 0  # tokens a KV block; 0 is the backend's own
    max_slots: int = 64  # sequences in one batch
    cuda_graphs: bool = True  # decode steps are captured, on a GPU
    threads: int = 0  # 0 takes every core
    grammar_bytes: int = GRAMMAR_BYTES  # memory of the process that compiles grammars
    grammar_cpu_s: float = GRAMMAR_CPU_S  # processor time that it may take for one


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may connect and what is bounded."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    model_name: str = "smollm2-135m"
    tool_format: str = "auto"  # how the model writes calls; auto: by its chat template
    max_sessions: int = 1000  # for each principal
    max_open_turns: int = 512  # running or waiting; more are refused as overloaded
    store_bytes: int = 1 << 30  # of turn records kept in memory
    max_body_bytes: int = 8 * 1024 * 1024
    reserve_output: int = 0  # tokens of the context kept free for a summary
    default_max_output_tokens: int = 1024
    dialect_sessions: int = 256  # for each principal, of requests that resend their history
    dialect_ttl_s: float = 6 * 3600.0  # such a session ends after so long without a request
    stored_responses_bytes: int = 64 * 1024 * 1024  # of /v1/responses, for `previous_response_id`
    strict_model: bool = False  # dialect requests must name the served model
    allow_force: bool = False  # `debug.force` is accepted (replay)
    prepared_prefills: int = 2  # histories prefilled ahead of a user message at a time; 0: none
    disconnect_grace_s: float = 5.0
    drain_s: float = 5.0  # open turns get so long when the server stops; then they are cancelled
    ping_s: float = 15.0
    body_timeout_s: float = 30.0  # a whole request body must arrive within
    send_timeout_s: float = 30.0  # a reader that takes nothing for so long is dropped


# Both torch and numba bring an OpenMP pool. A pool that spins on takes the cores from the other one
# and from other processes; one that sleeps at once pays for a wake-up in each of the 150 parallel
# regions of a step. So: a short spin, then sleep (DECISIONS.md, 7).
OPENMP_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}

# New objects between two searches for cycles, in the server's and the engine's process: one amid a
# turn delays it.
COLLECT_EVERY = 50_000


def cache_directory() -> Path:
    """Where converted models and compiled kernels are kept (AGENTSERVE_CACHE, else XDG)."""
    if own := os.environ.get("AGENTSERVE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "agentserve"


def kernel_cache() -> Path:
    """Where numba keeps what it compiles of the kernels: a directory for each text of them.

    Numba looks at the file of a function alone, not at those of the functions that it has compiled
    into it.
    """
    found = find_spec("agentserve_kernels")
    digest = hashlib.sha256()
    for folder in (found and found.submodule_search_locations) or []:
        for source in sorted(Path(folder).glob("*.py")):
            digest.update(source.read_bytes())
    return cache_directory() / "numba" / digest.hexdigest()[:16]
