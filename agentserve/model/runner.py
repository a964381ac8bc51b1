"""Executes step plans on the native decoder: block tables, one forward pass, sampling."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentserve.engine.plan import (
    SAMPLED,
    KvGroup,
    Row,
    RunnerInfo,
    SlotAdd,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from agentserve.model.batch import build_step
from agentserve.model.decoder import Decoder
from agentserve.model.logprobs import token_logprobs
from agentserve.model.sampler import TokenCounts, sample
from agentserve.model.slots import Slots
from agentserve.model.tiers import KvTiers
from agentserve.model.weights import weight_files

STEP_TOKENS = 128  # products are at full speed, and a turn's first token waits for few others


@dataclass(frozen=True)
class _Sampling:
    """How a running sequence is sampled."""

    add: SlotAdd
    counts: TokenCounts | None


@dataclass
class _Handle:
    """A launched step: logits of the sampling rows, in plan order."""

    plan: StepPlan
    logits: NDArray[np.float32]
    tokens: list[list[int]] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


def model_identity(directory: Path, dtype: torch.dtype) -> str:
    """Return a digest that changes with the config, the weight files or the storage dtype."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    digest.update(str(dtype).encode())
    return digest.hexdigest()


def table_width(decoder: Decoder) -> int:
    """Return how many blocks the longest sequence has."""
    return -(-decoder.spec.max_context // decoder.cache.shape[4])


def runner_info(
    decoder: Decoder, model: str, identity: str, max_slots: int, host_blocks: int, **more: int
) -> RunnerInfo:
    """Describe a runner on this decoder; `more` are other fields of RunnerInfo."""
    spec, cache = decoder.spec, decoder.cache
    return RunnerInfo(
        model=model,
        identity=identity,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        block_size=cache.shape[4],
        num_blocks=cache.shape[0],
        max_slots=max_slots,
        groups=[KvGroup(kind="full", layers=spec.layers, block_bytes=cache[0].nbytes)],
        dtype=str(cache.dtype).removeprefix("torch."),
        device=str(cache.device),
        weight_bytes=decoder.weight_bytes,
        host_blocks=host_blocks,
        **more,
    )


class TorchRunner:
    """A `plan.Runner` on the CPU: `launch` computes at once; saves and loads run beside steps.

    `collect` waits only for a copy, and only if the plan says so. Without `host_blocks` there is
    no host tier, and a plan that names it raises ValueError.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        model: str,
        identity: str,
        max_slots: int,
        host_blocks: int = 0,
    ) -> None:
        self._decoder = decoder
        self._sampling: dict[int, _Sampling] = {}
        self._slots = Slots(max_slots, table_width(decoder))
        self._tiers = KvTiers(decoder.cache, host_blocks)
        self.info = runner_info(
            decoder, model, identity, max_slots, host_blocks, step_tokens=STEP_TOKENS
        )

    def launch(self, plan: StepPlan) -> _Handle:
        """Apply the plan's changes and run its forward pass.

        Raises ValueError when a drop names another generation than the slot holds, and for copies
        to or from a host tier that is not there.
        """
        self._slots.update(plan)
        for drop in plan.dropped:
            del self._sampling[drop.slot]
        for add in plan.added:
            self._sampling[add.slot] = self._opened(add)
        self._tiers.copy(plan.copies)
        if not plan.rows:
            return _Handle(plan, np.empty((0, 0), np.float32))
        tokens = np.frombuffer(plan.tokens, np.int32)
        self._count_tokens(plan.rows, tokens)
        step = build_step(plan.rows, tokens, self._slots.tables, self.info.block_size)
        return _Handle(plan, self._decoder.forward(step).cpu().numpy())

    def sample(self, handle: _Handle, masks: dict[int, Any]) -> None:
        """Draw one token for each row that asks for it; see `plan.Runner.sample`."""
        sampled = 0
        for index, row in enumerate(handle.plan.rows):
            tokens, finite = list[int](), True
            logprobs = list[TokenLogprobs]()
            if row.sample:
                logits = handle.logits[sampled]
                token = self._draw(logits, row, masks.get(index))
                sampled += 1
                finite = token is not None
                if token is not None:
                    tokens, logprobs = [token], self._logprobs(logits, row, token)
            handle.tokens.append(tokens)
            handle.finite.append(finite)
            handle.logprobs.append(logprobs)

    def collect(self, handle: _Handle) -> StepResult:
        """Return what the step gave; a row without a finite logit has no token."""
        tickets, traffic = self._tiers.ended(handle.plan)
        return StepResult(
            handle.plan.step, handle.tokens, handle.finite, tickets, traffic, handle.logprobs
        )

    def _opened(self, add: SlotAdd) -> _Sampling:
        counts = None
        if add.sampling.needs_history:
            counts = TokenCounts(self.info.vocab_size, add.prompt_length)
            counts.add(np.frombuffer(add.history, np.int32), 0)
        return _Sampling(add, counts)

    def _count_tokens(self, rows: list[Row], tokens: NDArray[np.int32]) -> None:
        first = 0
        for row in rows:
            counts = self._sampling[row.slot].counts
            if counts is not None:
                counts.add(tokens[first : first + row.count], row.start)
            first += row.count

    def _draw(self, logits: NDArray[np.float32], row: Row, mask: Any) -> int | None:
        if not np.isfinite(logits).all():
            return None
        how = self._sampling[row.slot]
        position = row.start + row.count
        return sample(logits, how.add.sampling, position, counts=how.counts, mask=mask)

    def _logprobs(self, logits: NDArray[np.float32], row: Row, token: int) -> list[TokenLogprobs]:
        """Return those of the token that is taken, if the row asks for them."""
        add = self._sampling[row.slot].add
        if add.sampling.logprobs is None:
            return []
        forced = add.forced_at(row.start + row.count)
        taken = token if forced == SAMPLED else forced
        return [token_logprobs(logits, taken, add.sampling.logprobs)]
