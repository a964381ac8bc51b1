"""A runner whose steps take a set time, and whose step times another process can read.

Every turn it samples the same answer. It sleeps through a step, as one that waits for a device
does: the interpreter lock is free then.
"""

import mmap
import struct
import time
from pathlib import Path
from typing import Any

import msgspec

from agentserve.engine.compiler import CompilerProcess
from agentserve.engine.plan import KvGroup, RunnerInfo, StepPlan, StepResult
from agentserve.model.grammar import grammar_compiler

BLOCK = 32  # tokens, as on the CPU
BLOCK_BYTES = BLOCK * 23_040  # SmolLM2's


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runner's options."""

    directory: str  # the model's, for its tokenizer
    clock: str  # file of the step times
    answer: list[int]  # the tokens of every turn, the last one ends it
    vocab_size: int = 49_152
    max_context: int = 40_960
    num_blocks: int = 4_096


class StepTimes(msgspec.Struct, frozen=True):
    """Since the clock was reset, in time.perf_counter seconds; all zero before a step with rows."""

    first_launch: float
    first_collected: float
    last_collected: float


class SharedClock:
    """StepTimes in a memory-mapped file, and how long a step takes.

    The engine writes it, the server resets and reads it.
    """

    _FORMAT = struct.Struct("dddd")

    def __init__(self, path: Path) -> None:
        if not path.exists() or path.stat().st_size < self._FORMAT.size:
            path.write_bytes(bytes(self._FORMAT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._FORMAT.size)

    def reset(self, step_s: float = 0.0) -> None:
        """Forget the steps so far; from now on one takes `step_s`."""
        self._FORMAT.pack_into(self._memory, 0, 0.0, 0.0, 0.0, step_s)

    @property
    def step_s(self) -> float:
        """How long a step takes."""
        return float(self._FORMAT.unpack_from(self._memory)[3])

    def step(self, launched: float, collected: float) -> None:
        """Note a step with rows."""
        first_launch, first_collected, _, step_s = self._FORMAT.unpack_from(self._memory)
        times = (first_launch or launched, first_collected or collected, collected, step_s)
        self._FORMAT.pack_into(self._memory, 0, *times)

    def read(self) -> StepTimes:
        """Return the times since the last reset."""
        return StepTimes(*self._FORMAT.unpack_from(self._memory)[:3])


class ConstantRunner:
    """A Runner that computes nothing: copies are done at once, the answer is known."""

    def __init__(self, settings: Settings) -> None:
        self.info = RunnerInfo(
            model="constant",
            identity="constant",
            vocab_size=settings.vocab_size,
            max_context=settings.max_context,
            block_size=BLOCK,
            num_blocks=settings.num_blocks,
            max_slots=64,
            groups=[KvGroup("full", 1, BLOCK_BYTES)],
            dtype="none",
            host_blocks=settings.num_blocks,
        )
        self._clock = SharedClock(Path(settings.clock))
        self._launched = 0.0
        self._answer = settings.answer
        self._said: dict[int, int] = {}  # tokens of the answer, by slot

    def launch(self, plan: StepPlan) -> StepPlan:
        """Note when."""
        self._launched = time.perf_counter()
        self._said.update((entry.slot, 0) for entry in plan.added)
        return plan

    def sample(self, handle: StepPlan, masks: dict[int, Any]) -> None:
        """Do nothing: what is sampled is known."""

    def collect(self, handle: StepPlan) -> StepResult:
        """Return the next token of the answer for every row that samples."""
        if handle.rows:
            time.sleep(self._clock.step_s)
            self._clock.step(self._launched, time.perf_counter())
        return StepResult(
            step=handle.step,
            tokens=[self._next(row.slot) if row.sample else [] for row in handle.rows],
            finite=[True] * len(handle.rows),
            tickets=[copy.ticket for copy in handle.copies],
        )

    def _next(self, slot: int) -> list[int]:
        said = self._said[slot]
        self._said[slot] = said + 1
        return [self._answer[said]]


def build(options: dict[str, Any]) -> tuple[ConstantRunner, CompilerProcess]:
    """Return the runner and the grammar compiler of the real model."""
    settings = msgspec.convert(options, Settings)
    return ConstantRunner(settings), grammar_compiler(settings.directory, settings.vocab_size)
