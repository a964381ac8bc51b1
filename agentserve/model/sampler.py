"""From one row of logits to one token; depends on nothing but that row's own request.

Order: penalties, logit bias, grammar mask, temperature, top-k, top-p (nucleus, arXiv 1904.09751),
min-p (arXiv 2407.01082), draw.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentserve.engine.plan import SamplingParams

Floats = NDArray[np.float32]


class TokenCounts:
    """Which tokens a sequence holds, and how often its turn has put each of them out."""

    def __init__(self, vocab_size: int, prompt_length: int) -> None:
        self.seen = np.zeros(vocab_size, np.bool_)
        self.output = np.zeros(vocab_size, np.int32)
        self._prompt_length = prompt_length

    def add(self, tokens: Sequence[int] | NDArray[Any], start: int) -> None:
        """Count `tokens`, which stand at positions start, start + 1, ..."""
        ids = np.asarray(tokens, np.int64)
        self.seen[ids] = True
        np.add.at(self.output, ids[max(0, self._prompt_length - start) :], 1)


def sample(
    logits: Floats,
    params: SamplingParams,
    position: int,
    *,
    counts: TokenCounts | None = None,
    mask: Any = None,
) -> int | None:
    """Return the token for `position`, or None when the mask leaves no token.

    logits: finite float32 [vocab], not changed; mask: packed bitmask as in `Runner.sample`. Ties
    go to the lower token id.
    """
    scores = _adjusted(logits, params, counts)
    greedy = params.temperature == 0
    if mask is not None and not (greedy and is_allowed(mask, int(scores.argmax()))):
        scores = np.where(allowed_tokens(mask, scores.size), scores, -np.inf)
    best = int(scores.argmax())
    if scores[best] == -np.inf:
        return None
    if greedy:
        return best
    scaled = (scores - scores[best]).astype(np.float64) / params.temperature
    weights = np.exp(scaled)
    candidates = _candidates(weights, params)
    cumulative = np.cumsum(weights[candidates])
    drawn = np.searchsorted(cumulative, uniform(params.seed, position) * cumulative[-1], "right")
    return int(candidates[min(int(drawn), candidates.size - 1)])


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) from a counter-based generator (Philox): no state, no order."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(bits).random())


def is_allowed(mask: Any, token: int) -> bool:
    """Return the bit of one token; see `allowed_tokens`."""
    data = memoryview(mask).cast("B")
    return token // 8 < len(data) and bool(data[token // 8] >> token % 8 & 1)


def allowed_tokens(mask: Any, vocab_size: int) -> NDArray[np.bool_]:
    """Unpack a bitmask (bit i of little-endian word w allows token 32 w + i) to bool [vocab]."""
    data = np.frombuffer(mask, np.uint8)
    bits = np.unpackbits(data, count=min(vocab_size, data.size * 8), bitorder="little")
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[: bits.size] = bits
    return allowed


def allowed_words(mask: Any, count: int) -> NDArray[np.int32]:
    """Return a bitmask as `count` words; what a shorter one does not name is not allowed."""
    given = np.frombuffer(mask, "<i4")[:count]
    words = np.zeros(count, np.int32)
    words[: given.size] = given
    return words


def _adjusted(logits: Floats, params: SamplingParams, counts: TokenCounts | None) -> Floats:
    if counts is None and not params.logit_bias:
        return logits
    scores = logits.copy()
    if counts is not None:
        seen = scores[counts.seen]
        penalty = np.float32(params.repetition_penalty)
        scores[counts.seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        output = counts.output
        scores -= np.float32(params.presence_penalty) * (output > 0)
        scores -= np.float32(params.frequency_penalty) * output.astype(np.float32)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


def _candidates(weights: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64]:
    """Return the token ids that the filters leave, ascending; the likeliest is always there."""
    ids = np.flatnonzero(weights)
    if 0 < params.top_k < ids.size:
        ids = _most_likely(ids, weights, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(ids, weights, params.top_p)
    if params.min_p > 0.0:
        ids = ids[weights[ids] >= params.min_p]  # the likeliest token's weight is 1
    return ids


def _most_likely(
    ids: NDArray[np.int64], weights: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    least = np.partition(weights[ids], ids.size - count)[ids.size - count]
    above = ids[weights[ids] > least]
    ties = ids[weights[ids] == least]
    return np.sort(np.concatenate((above, ties[: count - above.size])))


def _nucleus(
    ids: NDArray[np.int64], weights: NDArray[np.float64], top_p: float
) -> NDArray[np.int64]:
    shares = weights[ids] / weights[ids].sum()
    # Tokens this rare sum to less than 1 - top_p, so the nucleus needs none of them to be sorted.
    common = shares >= min((1.0 - top_p) / ids.size, shares.max())
    ids, shares = ids[common], shares[common]
    order = np.argsort(-shares, kind="stable")
    count = int(np.searchsorted(np.cumsum(shares[order]), top_p)) + 1
    return np.sort(ids[order[:count]])
