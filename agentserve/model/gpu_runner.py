"""Executes step plans on a GPU, one step ahead of the host: nothing but `collect` waits.

`launch` and `sample` queue work on one stream. Block tables and sampled tokens live on the device;
what a step needs from the host goes over in one copy, its tokens come back in another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from agentserve_kernels.tensors import Workspace
from numpy.typing import NDArray

from agentserve.engine.plan import MOST_LOGPROBS, StepPlan, StepResult, TokenLogprobs
from agentserve.model.accelerator import Event, open_accelerator
from agentserve.model.batch import build_step
from agentserve.model.decoder import Decoder
from agentserve.model.gpu_forward import GpuForward, inputs, longest_chunk, step_arrays
from agentserve.model.gpu_sampler import NO_TOKEN, GpuSampler
from agentserve.model.graphs import DecodeGraphs, is_plain_decode
from agentserve.model.logprobs import read_rows
from agentserve.model.runner import runner_info, table_width
from agentserve.model.slots import Slots
from agentserve.model.tiers import KvTiers
from agentserve.model.upload import Packed, Uploader

STEP_TOKENS = 2048  # enough for products at full speed, few enough for those who wait for a token
IN_FLIGHT = 2  # steps whose tokens are on their way, at depth 1
ROW = 2 + 2 * MOST_LOGPROBS  # int32: a token, its log probability, the likeliest and theirs


@dataclass
class _Handle:
    """A launched step: logits of its sampling rows, and where its tokens arrive on the host.

    Behind them arrive the log probabilities of the rows in `asked`, as many of the likeliest each.
    """

    plan: StepPlan
    packed: Packed
    logits: torch.Tensor | None
    asked: dict[int, int]
    arrived: torch.Tensor | None = None
    ended: Event | None = None


class GpuRunner:
    """A `plan.Runner` of depth 1. On the CPU device everything is done at once, for tests.

    Without `host_blocks` there is no host tier, and a plan that names it raises ValueError.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        model: str,
        identity: str,
        max_slots: int,
        host_blocks: int = 0,
        graphs: bool = True,
    ) -> None:
        """Capture the graphs, if there are to be any.

        Raises TypeError unless the decoder's forward pass is a GpuForward.
        """
        if not isinstance(decoder.implementation, GpuForward):
            raise TypeError(f"not a GpuForward: {decoder.implementation}")
        self._forward = decoder.implementation
        self._accelerator = accelerator = open_accelerator(decoder.cache.device)
        self._slots = Slots(max_slots, table_width(decoder))
        self._tables = self._slots.tables.to(accelerator.device, copy=True)
        self._tiers = KvTiers(decoder.cache, host_blocks)
        self._sampler = GpuSampler(decoder.spec.vocab_size, max_slots, accelerator)
        self._upload = Uploader(accelerator)
        self._graphs = DecodeGraphs(accelerator, self._decode, max_slots) if graphs else None
        if self._graphs is not None:
            self._graphs.capture()
        self._arrivals = [
            torch.empty(max_slots * ROW, dtype=torch.int32, pin_memory=accelerator.page_locks)
            for _ in range(IN_FLIGHT)
        ]
        more = {"depth": 1, "step_tokens": STEP_TOKENS}
        self.info = runner_info(decoder, model, identity, max_slots, host_blocks, **more)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> _Handle:
        """Queue the plan's changes, copies and forward pass.

        Raises ValueError when a drop names another generation than the slot holds, and for copies
        to or from a host tier that is not there.
        """
        writes = self._slots.update(plan)
        for add in plan.added:
            self._sampler.open(add)
        self._tiers.copy(plan.copies)
        arrays = self._sampler.arrays(plan)
        arrays |= {"table_places": writes.places, "table_blocks": writes.blocks}
        if not plan.rows:
            return _Handle(plan, self._prepared(arrays), None, {})
        tokens = np.frombuffer(plan.tokens, np.int32)
        step = build_step(plan.rows, tokens, self._slots.tables, self.info.block_size)
        if self._graphs is not None and is_plain_decode(plan.rows):
            packed = self._prepared(self._graphs.fill(step_arrays(step)) | arrays)
            logits = self._graphs.replay(packed)[: len(plan.rows)]
        else:
            packed = self._prepared(step_arrays(step) | arrays)
            logits = self._run(packed, longest_chunk(step))
        return _Handle(plan, packed, logits, self._sampler.asked(plan))

    @torch.inference_mode()
    def sample(self, handle: _Handle, masks: dict[int, Any]) -> None:
        """Queue the drawing of tokens and their copy to the host; see `plan.Runner.sample`."""
        if handle.logits is not None and handle.logits.shape[0]:
            order = [index for index, row in enumerate(handle.plan.rows) if row.sample]
            places = {place: masks[index] for place, index in enumerate(order) if index in masks}
            tokens = self._sampler.draw(handle.logits, handle.packed, places)
            given = tokens
            if handle.asked:
                most = max(handle.asked.values())
                beside = self._sampler.logprobs(handle.logits, tokens, handle.packed, most)
                given = torch.cat((tokens, beside.view(-1)))
            arrival = self._arrivals.pop(0)
            self._arrivals.append(arrival)
            handle.arrived = arrival[: given.shape[0]]
            handle.arrived.copy_(given, non_blocking=True)
        handle.ended = self._accelerator.record()

    def collect(self, handle: _Handle) -> StepResult:
        """Wait for the step; a row whose logits were not finite, or all barred, has no token."""
        assert handle.ended is not None, "sample comes before collect"
        handle.ended.synchronize()
        rows = handle.plan.rows
        arrived = np.empty(0, np.int32) if handle.arrived is None else handle.arrived.numpy()
        drawn = iter(arrived[: sum(row.sample for row in rows)].tolist())
        tokens = [[next(drawn)] if row.sample else [] for row in rows]
        finite = [given != [NO_TOKEN] for given in tokens]
        tokens = [given if good else [] for given, good in zip(tokens, finite, strict=True)]
        tickets, traffic = self._tiers.ended(handle.plan)
        logprobs = self._logprobs(handle, arrived)
        return StepResult(handle.plan.step, tokens, finite, tickets, traffic, logprobs)

    def _logprobs(self, handle: _Handle, arrived: NDArray[np.int32]) -> list[list[TokenLogprobs]]:
        """Return what the rows have that ask for it, nothing at all when none does."""
        if not handle.asked:
            return []
        rows = handle.plan.rows
        beside = arrived[sum(row.sample for row in rows) :].reshape(len(handle.asked), -1)
        read = dict(zip(handle.asked, read_rows(beside, [*handle.asked.values()]), strict=True))
        return [[read[index]] if index in read else [] for index in range(len(rows))]

    def _prepared(self, arrays: Mapping[str, NDArray[Any]]) -> Packed:
        """Queue the arrays' copy and what the tables and the sampler do with it."""
        packed = self._upload(arrays)
        self._tables.view(-1).index_copy_(0, packed["table_places"], packed["table_blocks"])
        self._sampler.begin(packed)
        return packed

    def _decode(self, packed: Packed, workspace: Workspace) -> torch.Tensor:
        return self._run(packed, 0, workspace)

    def _run(
        self, packed: Packed, longest: int, workspace: Workspace | None = None
    ) -> torch.Tensor:
        """Return the logits of a step without waiting: also called while a graph is captured."""
        step = inputs(packed, self._tables, longest)
        rows, slots = step.decode.rows, step.decode.slots
        known = self._sampler.known(step.tokens[rows], slots)
        step = replace(step, tokens=step.tokens.index_copy(0, rows, known))
        return self._forward.run(step, workspace)
