"""Log probabilities of tokens and of the likeliest ones beside them, from the model's own logits.

Log softmax before penalties, biases, masks and temperature, in float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentserve.engine.plan import TokenLogprobs


def token_logprobs(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Return those of `token` and of the `count` likeliest; ties go to the lower token id.

    logits: finite float32 [vocab], not changed.
    """
    best = logits.max()
    total = best + np.log(np.exp(logits - best).sum())
    count = min(count, logits.size)
    top: NDArray[np.int64] = np.empty(0, np.int64)
    if count:
        least = np.partition(logits, logits.size - count)[logits.size - count]
        reached = np.flatnonzero(logits >= least)
        top = reached[np.argsort(-logits[reached], kind="stable")[:count]]
    values = (logits[top] - total).tolist()
    return TokenLogprobs(float(logits[token] - total), top.tolist(), values)


def logprob_rows(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Return, for each row, what `read_rows` reads: int32 [R, 1 + 2 * most]; nothing waits.

    logits: [R, vocab], of any floating dtype; tokens: int64 [R]. Which of equal logits come first
    is the device's choice.
    """
    logits = logits.float()
    total = torch.logsumexp(logits, 1, keepdim=True)
    best = torch.topk(logits, min(most, logits.shape[1]), dim=1)
    values = torch.cat((logits.gather(1, tokens[:, None]), best.values), 1) - total
    return torch.cat((values.view(torch.int32), best.indices.int()), 1)


def read_rows(rows: NDArray[np.int32], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the rows of `logprob_rows`, cut to the number that each has asked for."""
    size = rows.shape[1] // 2 + 1
    values: Any = np.ascontiguousarray(rows[:, :size]).view(np.float32).tolist()
    ids = rows[:, size:].tolist()
    return [
        TokenLogprobs(of[0], top[:count], of[1 : 1 + count])
        for of, top, count in zip(values, ids, counts, strict=True)
    ]
