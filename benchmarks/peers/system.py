"""What the race needs of a system, and what systems share: places, processes, token histories."""

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from peers.workload import Case, TokenTurn

BENCHMARKS = Path(__file__).resolve().parents[1]
STOP_S = 15.0
TAIL = 600  # characters of a log that a failure quotes
# Nobody looks for models, tokenizers or a place to send statistics to.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
# What this machine's shell sets for other programs.
LEFT_OUT = re.compile(r"PYTHON(PATH|HOME)|OPENBLAS_.*|OMP_.*|GOMP_.*|MKL_.*|KMP_.*")

Heard = Callable[[], None]


class SystemFailed(RuntimeError):
    """A system did not start, ended early, or did other work than it was given."""


class Served(msgspec.Struct, frozen=True):
    """What a system says of a turn, in tokens; None where it does not say."""

    output: int
    prompt: int | None = None
    cached: int | None = None


@dataclass(frozen=True)
class Places:
    """Where the environments and models of the peers are, and where their logs go."""

    root: Path
    logs: Path
    threads: int

    @property
    def weights(self) -> Path:
        """The safetensors directory in bfloat16."""
        return self.root / "models" / "smollm2-bf16"

    def gguf(self, dtype: str) -> Path:
        """The same weights as one file; dtype is "bf16" or "f16"."""
        return self.root / "models" / f"smollm2-{dtype}.gguf"

    def python(self, name: str) -> Path:
        """The interpreter of an environment. Raises SystemFailed where there is none."""
        path = self.root / name / "bin" / "python"
        if not path.exists():
            raise SystemFailed(f"{path.parent.parent} is not installed: make peers")
        return path


class System(Protocol):
    """One contestant. Every run starts and stops it, so that none finds old KV."""

    name: str

    async def start(self, case: Case, turns: list[list[TokenTurn]], places: Places) -> None:
        """Start and warm up. Raises SystemFailed."""
        ...

    def about(self) -> dict[str, Any]:
        """Return what a record needs to say of it: version, settings."""
        ...

    async def turn(self, session: int, index: int, heard: Heard) -> Served:
        """Run one turn to its end; calls `heard` at the first output token."""
        ...

    async def stop(self) -> None:
        """End every process that was started; safe to call at any time."""
        ...


@dataclass
class Histories:
    """What a client of a stateless endpoint keeps: every session's token ids."""

    turns: list[list[TokenTurn]]
    ids: dict[int, list[int]] = field(default_factory=dict)

    def prompt(self, session: int, index: int) -> list[int]:
        """Return the prompt of a turn: all that was said before, and what is new."""
        log = self.ids.setdefault(session, [])
        log += self.turns[session][index].new
        return log

    def said(self, session: int, ids: list[int]) -> None:
        """Keep what the system sampled."""
        self.ids[session] += ids


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a peer: this one without what is meant for others."""
    kept = {name: value for name, value in os.environ.items() if not LEFT_OUT.fullmatch(name)}
    return kept | OFFLINE | dict(extra)


def computing_dtype(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """Return the dtype that torch computes these 16-bit weights fastest in, on this CPU.

    Without instructions for bfloat16 torch emulates its products: on a Zen 3, prefill by
    transformers took 13 ms a token, and 3 ms with the same weights widened to float32.
    """
    flags = cpu.read_text() if cpu.exists() else ""
    return "bfloat16" if re.search(r"\b(avx512_bf16|amx_bf16)\b", flags) else "float32"


def free_port() -> int:
    """Return a port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Child:
    """A process in a group of its own, which is ended with whatever it has started itself."""

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise SystemFailed, with the end of the log, when the process has ended."""
        if (status := self._process.poll()) is not None:
            raise SystemFailed(f"ended with status {status}: {tail(self._log)}")

    async def stop(self) -> None:
        """End the group: asked first, killed after some seconds."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not _signal_group(self._process.pid, number):
                break
            try:
                await asyncio.to_thread(self._process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                continue
        await asyncio.to_thread(self._process.wait)


def _signal_group(leader: int, number: int) -> bool:
    """Send a signal to the group that `leader` leads; False when nobody is left in it."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    return True


def tail(log: Path) -> str:
    """Return the end of a log in one line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return " | ".join(line.strip() for line in text[-TAIL:].splitlines() if line.strip())
