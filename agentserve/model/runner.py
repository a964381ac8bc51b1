"""Executes step plans on the native decoder: block tables, one forward pass, sampling."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentserve.engine.copier import Copier
from agentserve.engine.plan import (
    Copy,
    KvGroup,
    Row,
    RunnerInfo,
    SamplingParams,
    SlotAdd,
    StepPlan,
    StepResult,
    Traffic,
)
from agentserve.model.batch import build_step
from agentserve.model.copier import host_slab, open_device
from agentserve.model.decoder import Decoder
from agentserve.model.sampler import TokenCounts, sample
from agentserve.model.weights import weight_files

WAIT_S = 0.005  # of a step that has nothing to compute, for a copy to end


@dataclass
class _Slot:
    """What the runner keeps of a running sequence, beside its row in the table."""

    generation: int
    sampling: SamplingParams
    blocks: int = 0
    counts: TokenCounts | None = None


@dataclass
class _Handle:
    """A launched step: logits of the sampling rows, in plan order."""

    plan: StepPlan
    logits: NDArray[np.float32]
    tokens: list[list[int]] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)


def model_identity(directory: Path, dtype: torch.dtype) -> str:
    """Return a digest that changes with the config, the weight files or the storage dtype."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    digest.update(str(dtype).encode())
    return digest.hexdigest()


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
        spec, cache = decoder.spec, decoder.cache
        num_blocks, _, _, _, block_size, _ = cache.shape
        self._decoder = decoder
        self._slots: dict[int, _Slot] = {}
        width = -(-spec.max_context // block_size)
        self._tables = torch.zeros((max_slots, width), dtype=torch.int32)
        self._tiers = self._copier = None
        if host_blocks:
            self._tiers = open_device(cache, host_slab(cache, host_blocks))
            self._copier = Copier(self._tiers)
        group = KvGroup(kind="full", layers=spec.layers, block_bytes=cache[0].nbytes)
        self.info = RunnerInfo(
            model=model,
            identity=identity,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            block_size=block_size,
            num_blocks=num_blocks,
            max_slots=max_slots,
            groups=[group],
            dtype=str(cache.dtype).removeprefix("torch."),
            device=str(cache.device),
            weight_bytes=decoder.weight_bytes,
            host_blocks=host_blocks,
        )

    def launch(self, plan: StepPlan) -> _Handle:
        """Apply the plan's changes and run its forward pass.

        Raises ValueError when a drop names another generation than the slot holds, and for copies
        to or from a host tier that is not there.
        """
        self._update_slots(plan)
        self._copy(plan.copies)
        if not plan.rows:
            return _Handle(plan, np.empty((0, 0), np.float32))
        tokens = np.frombuffer(plan.tokens, np.int32)
        self._count_tokens(plan.rows, tokens)
        step = build_step(plan.rows, tokens, self._tables, self.info.block_size)
        return _Handle(plan, self._decoder.forward(step).cpu().numpy())

    def sample(self, handle: _Handle, masks: dict[int, Any]) -> None:
        """Draw one token for each row that asks for it; see `plan.Runner.sample`."""
        sampled = 0
        for index, row in enumerate(handle.plan.rows):
            tokens, finite = [], True
            if row.sample:
                token = self._draw(handle.logits[sampled], row, masks.get(index))
                sampled += 1
                finite = token is not None
                tokens = [] if token is None else [token]
            handle.tokens.append(tokens)
            handle.finite.append(finite)

    def collect(self, handle: _Handle) -> StepResult:
        """Return what the step gave; a row without a finite logit has no token."""
        plan = handle.plan
        tickets = [copy.ticket for copy in plan.copies if copy.kind == "device"]
        traffic = Traffic()
        if self._copier is not None and self._tiers is not None:
            if plan.wait:
                self._copier.wait(WAIT_S)
            # `again` first: it knows what earlier polls have reported, not what this one will.
            tickets += self._copier.again(plan.overdue) + self._copier.poll()
            traffic = self._tiers.traffic()
        return StepResult(plan.step, handle.tokens, handle.finite, tickets, traffic)

    def _update_slots(self, plan: StepPlan) -> None:
        for drop in plan.dropped:
            slot = self._slots.pop(drop.slot)
            if slot.generation != drop.generation:
                raise ValueError(f"slot {drop.slot} holds generation {slot.generation}: {drop}")
        for add in plan.added:
            self._slots[add.slot] = self._opened(add)
        for append in plan.appended:
            slot = self._slots[append.slot]
            end = slot.blocks + len(append.blocks)
            self._tables[append.slot, slot.blocks : end] = torch.tensor(append.blocks)
            slot.blocks = end

    def _opened(self, add: SlotAdd) -> _Slot:
        counts = None
        if add.sampling.needs_history:
            counts = TokenCounts(self.info.vocab_size, add.prompt_length)
            counts.add(np.frombuffer(add.history, np.int32), 0)
        return _Slot(add.generation, add.sampling, counts=counts)

    def _copy(self, copies: list[Copy]) -> None:
        cache = self._decoder.cache
        moves: list[Copy] = []
        for copy in copies:
            if copy.kind == "device":
                cache[copy.target, ..., : copy.tokens, :] = cache[
                    copy.source, ..., : copy.tokens, :
                ]
            else:
                moves.append(copy)
        if self._copier is not None:
            self._copier.submit(moves)
        elif moves:
            raise ValueError(f"this runner has no host tier: {moves[0]}")

    def _count_tokens(self, rows: list[Row], tokens: NDArray[np.int32]) -> None:
        first = 0
        for row in rows:
            counts = self._slots[row.slot].counts
            if counts is not None:
                counts.add(tokens[first : first + row.count], row.start)
            first += row.count

    def _draw(self, logits: NDArray[np.float32], row: Row, mask: Any) -> int | None:
        if not np.isfinite(logits).all():
            return None
        slot = self._slots[row.slot]
        position = row.start + row.count
        return sample(logits, slot.sampling, position, counts=slot.counts, mask=mask)
