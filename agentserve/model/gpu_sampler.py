"""Sampling on the device: nothing of it waits, and the tokens stay there for the next step.

What a row's sampling needs of its history is counted on the device, because the host does not know
the newest token when the next step is launched.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from agentserve_kernels.gpu.sampling import sample
from agentserve_kernels.gpu.sampling_rows import DTYPES, SamplingRows
from numpy.typing import NDArray

from agentserve.engine.plan import Row, SlotAdd, StepPlan
from agentserve.model.accelerator import Accelerator
from agentserve.model.logprobs import logprob_rows
from agentserve.model.sampler import allowed_words
from agentserve.model.upload import Packed, Uploader

FILTERS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NO_TOKEN = -1  # of a row whose logits were not finite, or all barred
_Counted = tuple[int, NDArray[np.int32], int]  # slot, tokens, position of the first


class GpuSampler:
    """How each slot is sampled, what its sequence holds, and the token that it sampled last."""

    def __init__(self, vocab_size: int, max_slots: int, accelerator: Accelerator) -> None:
        self._vocab = vocab_size
        self._device = accelerator.device
        self._upload = Uploader(accelerator)
        self._columns = {name: np.zeros(max_slots, kind) for name, kind in FILTERS.items()}
        self._slots: dict[int, SlotAdd] = {}
        self._prompts: dict[int, int] = {}  # their lengths, of slots that are penalised
        self._opened: list[_Counted] = []  # histories that are not counted yet
        # One more than there are slots: rows that only fill a batch are of that one.
        self._last = torch.zeros(max_slots + 1, dtype=torch.int64, device=self._device)
        self._seen: torch.Tensor | None = None  # bool [slots, vocab], once somebody is penalised
        self._output: torch.Tensor | None = None  # int32 [slots, vocab]: counts of this turn

    def open(self, add: SlotAdd) -> None:
        """Take note of how the slot's new sequence is sampled."""
        slot, params = add.slot, add.sampling
        self._slots[slot] = add
        for name in FILTERS:
            value = getattr(params, name)
            self._columns[name][slot] = _signed(value) if name == "seed" else value
        self._prompts.pop(slot, None)
        self._opened = [counted for counted in self._opened if counted[0] != slot]
        if params.needs_history:
            self._prompts[slot] = add.prompt_length
            self._opened.append((slot, np.frombuffer(add.history, np.int32), 0))

    def arrays(self, plan: StepPlan) -> dict[str, NDArray[Any]]:
        """Return what `begin` and `draw` need of the plan on the device."""
        rows = [row for row in plan.rows if row.sample]
        slots = np.array([row.slot for row in rows], np.int64)
        ends = np.array([row.start + row.count for row in rows], np.int64)
        arrays: dict[str, NDArray[Any]] = {n: column[slots] for n, column in self._columns.items()}
        arrays |= {"position": ends, "sampled_slots": slots}
        return arrays | self._counted(plan) | self._adjusted(rows) | self._asked(rows)

    def begin(self, packed: Packed) -> None:
        """Count the tokens of the plan, before its forward pass; see `known` for SAMPLED."""
        for slot, _, _ in self._opened:
            for counts in self._counts():
                counts[slot].zero_()
        self._opened = []
        slots = packed["counted_slots"]
        if not slots.shape[0]:
            return
        seen, output = self._counts()
        places = slots * self._vocab + self.known(packed["counted_tokens"], slots)
        seen.view(-1).index_fill_(0, places, True)
        output.view(-1).index_add_(0, places, packed["counted_output"])

    def known(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return tokens, with what each slot sampled last in the place of SAMPLED.

        A row that gave no token has left -1; any id will do then.
        """
        return torch.where(tokens < 0, self._last[slots].clamp_min(0), tokens)

    def draw(self, logits: torch.Tensor, packed: Packed, masks: Mapping[int, Any]) -> torch.Tensor:
        """Return a token for each row of logits [S, vocab], int32 [S], or NO_TOKEN.

        `masks` are by row of the logits.
        """
        count = logits.shape[0]
        tokens = torch.empty(count, dtype=torch.int32, device=self._device)
        finite = torch.empty(count, dtype=torch.bool, device=self._device)
        rows = SamplingRows(**{name: packed[name] for name in DTYPES})
        sample(logits, rows, tokens, finite, self._added(logits, packed), self._mask(count, masks))
        self._last.index_copy_(0, packed["sampled_slots"], tokens.long())
        return tokens

    def asked(self, plan: StepPlan) -> dict[int, int]:
        """Return how many log probabilities the rows of the plan want that ask for them."""
        wanted = {
            index: self._slots[row.slot].sampling.logprobs
            for index, row in enumerate(plan.rows)
            if row.sample
        }
        return {index: count for index, count in wanted.items() if count is not None}

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, packed: Packed, most: int
    ) -> torch.Tensor:
        """Return `logprob_rows` of the rows that ask, for the tokens that are taken.

        logits: [S, vocab], with at most `most` of the likeliest; tokens: int32 [S], as drawn.
        """
        rows, forced = packed["logprob_rows"], packed["logprob_forced"]
        taken = torch.where(forced < 0, tokens[rows].long(), forced).clamp_min(0)
        return logprob_rows(logits[rows], taken, most)

    def _asked(self, rows: list[Row]) -> dict[str, NDArray[Any]]:
        """Return which of the sampled rows ask for log probabilities, and their forced tokens."""
        asking = [
            (index, self._slots[row.slot].forced_at(row.start + row.count))
            for index, row in enumerate(rows)
            if self._slots[row.slot].sampling.logprobs is not None
        ]
        return {
            "logprob_rows": np.array([index for index, _ in asking], np.int64),
            "logprob_forced": np.array([token for _, token in asking], np.int64),
        }

    def _counted(self, plan: StepPlan) -> dict[str, NDArray[Any]]:
        """Return the tokens to be counted: those of this step's rows, and histories."""
        entries = list(self._opened)
        tokens, first = np.frombuffer(plan.tokens, np.int32), 0
        for row in plan.rows:
            if row.slot in self._prompts:
                entries.append((row.slot, tokens[first : first + row.count], row.start))
            first += row.count
        slots = [np.full(given.size, slot, np.int64) for slot, given, _ in entries]
        outputs = [
            (np.arange(start, start + given.size) >= self._prompts[slot]).astype(np.int32)
            for slot, given, start in entries
        ]
        return {
            "counted_slots": _joined(slots, np.int64),
            "counted_tokens": _joined([given for _, given, _ in entries], np.int64),
            "counted_output": _joined(outputs, np.int32),
        }

    def _adjusted(self, rows: list[Row]) -> dict[str, NDArray[Any]]:
        """Return which of the sampled rows have penalties and biases, and these."""
        penalised = [index for index, row in enumerate(rows) if row.slot in self._prompts]
        params = [self._slots[rows[index].slot].sampling for index in penalised]
        biases = [
            (index * self._vocab + token, value)
            for index, row in enumerate(rows)
            for token, value in self._slots[row.slot].sampling.logit_bias.items()
        ]
        return {
            "penalised_rows": np.array(penalised, np.int64),
            "penalised_slots": np.array([rows[index].slot for index in penalised], np.int64),
            **{
                name: np.array([getattr(p, name) for p in params], np.float32) for name in PENALTIES
            },
            "bias_places": np.array([place for place, _ in biases], np.int64),
            "biases": np.array([value for _, value in biases], np.float32),
        }

    def _added(self, logits: torch.Tensor, packed: Packed) -> torch.Tensor | None:
        """Return what penalties and biases add to the logits, float32 [S, vocab]."""
        rows, places = packed["penalised_rows"], packed["bias_places"]
        if not (rows.shape[0] or places.shape[0]):
            return None
        added = torch.zeros(logits.shape, device=self._device)
        if rows.shape[0]:
            added.index_copy_(0, rows, self._penalties(logits[rows].float(), packed))
        return added.view(-1).index_add_(0, places, packed["biases"]).view(logits.shape)

    def _penalties(self, logits: torch.Tensor, packed: Packed) -> torch.Tensor:
        seen, output = (each[packed["penalised_slots"]] for each in self._counts())
        repetition, presence, frequency = (packed[name][:, None] for name in PENALTIES)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        change = torch.where(seen, repeated - logits, 0.0)
        return change - presence * (output > 0) - frequency * output

    def _mask(self, count: int, masks: Mapping[int, Any]) -> torch.Tensor | None:
        if not masks:
            return None
        words = np.full((count, -(-self._vocab // 32)), -1, np.int32)
        for index, mask in masks.items():
            words[index] = allowed_words(mask, words.shape[1])
        return self._upload({"mask": words})["mask"]

    def _counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._seen is None or self._output is None:
            shape = (self._last.shape[0] - 1, self._vocab)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._seen, self._output


def _joined(arrays: list[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _signed(seed: int) -> int:
    """Return the 64 bits of a seed as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
