"""From logits to tokens without a word to the host: one program a row, nothing sorted.

Order as in the CPU's sampler: added penalties and biases, grammar mask, temperature, top-k, top-p
(nucleus, arXiv 1904.09751), min-p (arXiv 2407.01082), draw. What the three filters leave is the
tokens over one weight, and the first few of exactly that weight; that weight is searched for by
its bits. The draw is one number of a counter-based generator (Philox 4x32-10, Salmon et al., SC11)
by (seed, position), taken through the cumulative weights in the order of token ids.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from agentserve_kernels.gpu.launch import STORAGE, Launch, Tuning
from agentserve_kernels.gpu.sampling_rows import SamplingRows
from agentserve_kernels.tensors import check

WIDEST_TILE = 4096


@triton.jit
def _scores(row: tl.tuple, columns: tl.tensor, ADDED: tl.constexpr, MASKED: tl.constexpr) -> Any:
    """Return (which logits are not finite, scores); scores of what may not be drawn are -inf."""
    logits, added, mask, size = row
    inside = columns < size
    scores = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
    broken = (scores != scores) | (tl.abs(scores) == float("inf"))
    if ADDED:
        scores += tl.load(added + columns, mask=inside, other=0.0)
    if MASKED:
        words = tl.load(mask + columns // 32, mask=inside, other=0)
        inside = inside & (((words >> (columns % 32)) & 1) != 0)
    return broken, tl.where(inside, scores, float("-inf"))


@triton.jit
def _weights(
    scaled: tl.tuple, columns: tl.tensor, ADDED: tl.constexpr, MASKED: tl.constexpr
) -> Any:
    """Return (weights, their bits). The likeliest token weighs 1, an excluded one 0."""
    logits, added, mask, size, best, sharpness = scaled
    _, scores = _scores((logits, added, mask, size), columns, ADDED, MASKED)
    weights = tl.exp2((scores - best) * sharpness)
    # Bits of floats that are not negative are in the order of the floats.
    return weights, weights.to(tl.int32, bitcast=True)


@triton.jit
def _likeliest(row: tl.tuple, ADDED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr) -> Any:
    """Return (whether all logits are finite, highest score, the first token that has it or -1)."""
    _, _, _, size = row
    finite = tl.full([], 1, tl.int1)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    for start in range(0, size, TILE):
        broken, scores = _scores(row, start + tl.arange(0, TILE), ADDED, MASKED)
        finite = finite & (tl.max(broken.to(tl.int32), axis=0) == 0)
        highest = tl.max(scores, axis=0)
        place = start + tl.argmax(scores, axis=0, tie_break_left=True)
        token = tl.where(highest > best, place, token)
        best = tl.maximum(best, highest)
    return finite, best, token


@triton.jit
def _weigh(
    scaled: tl.tuple,
    pivots: tl.tuple,
    COUNT: tl.constexpr,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Return the number (COUNT) or the weight of the tokens whose bits reach each of 3 pivots."""
    _, _, _, size, _, _ = scaled
    a, b, c = pivots
    sum_a = tl.zeros([TILE], tl.float32)
    sum_b, sum_c = sum_a, sum_a
    for start in range(0, size, TILE):
        weights, bits = _weights(scaled, start + tl.arange(0, TILE), ADDED, MASKED)
        if COUNT:
            weights = tl.full([TILE], 1.0, tl.float32)
        sum_a += tl.where(bits >= a, weights, 0.0)
        sum_b += tl.where(bits >= b, weights, 0.0)
        sum_c += tl.where(bits >= c, weights, 0.0)
    return tl.sum(sum_a, axis=0), tl.sum(sum_b, axis=0), tl.sum(sum_c, axis=0)


@triton.jit
def _threshold(  # noqa: PLR0913 - a kernel's arguments are flat
    scaled: tl.tuple,
    low: tl.tensor,
    wanted: tl.tensor,
    COUNT: tl.constexpr,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Return (highest bits that tokens of at least `wanted` reach, what those above them reach).

    `low` is reached by as much as is wanted. Each pass over the row leaves a quarter of the range.
    """
    high = tl.full([], 0x3F800001, tl.int32)  # the bits of 1.0, and one
    above = tl.full([], 0.0, tl.float32)
    while high - low > 1:
        step = (high - low + 3) // 4
        a = tl.minimum(low + step, high)
        b = tl.minimum(a + step, high)
        c = tl.minimum(b + step, high)
        at_a, at_b, at_c = _weigh(scaled, (a, b, c), COUNT, ADDED, MASKED, TILE)
        if at_c >= wanted:
            low = c
        elif at_b >= wanted:
            low, high, above = b, c, at_c
        elif at_a >= wanted:
            low, high, above = a, b, at_b
        else:
            high, above = a, at_a
    return low, above


@triton.jit
def _filters(
    scaled: tl.tuple,
    filters: tl.tuple,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Return (bits, ties): kept are the tokens above the bits, and the first `ties` at them."""
    top_k, top_p, min_p = filters
    bits = tl.full([], 0, tl.int32)
    ties = tl.full([], 0.0, tl.float32)
    least = bits + 1  # a weight that is not zero
    if top_k > 0:
        wanted = top_k.to(tl.float32)
        pivots = (least, least, least)
        candidates, _, _ = _weigh(scaled, pivots, True, ADDED, MASKED, TILE)
        if candidates > wanted:
            bits, above = _threshold(scaled, least, wanted, True, ADDED, MASKED, TILE)
            ties = wanted - above
    if top_p < 1.0:
        pivots = (bits + 1, bits + 1, bits + 1)
        total, _, _ = _weigh(scaled, pivots, False, ADDED, MASKED, TILE)
        total += ties * bits.to(tl.float32, bitcast=True)
        wanted = top_p * total
        nucleus, above = _threshold(
            scaled, tl.maximum(bits, least), wanted, False, ADDED, MASKED, TILE
        )
        enough = tl.ceil((wanted - above) / nucleus.to(tl.float32, bitcast=True))
        enough = tl.maximum(enough, 1.0)
        ties = tl.where(nucleus == bits, tl.minimum(ties, enough), enough)
        bits = nucleus
    floor = min_p.to(tl.int32, bitcast=True)
    ties = tl.where(floor > bits, 0.0, ties)
    bits = tl.where(floor > bits, floor - 1, bits)
    return bits, ties


@triton.jit
def _kept(
    weights: tl.tensor, bits: tl.tensor, least: tl.tensor, ties: tl.tensor, met: tl.tensor
) -> Any:
    """Return (weights with 0 for what is filtered, ties met so far)."""
    tied = (bits == least).to(tl.float32)
    rank = met + tl.cumsum(tied, axis=0)
    kept = (bits > least) | ((tied > 0) & (rank <= ties))
    return tl.where(kept, weights, 0.0), met + tl.sum(tied, axis=0)


@triton.jit
def _draw(
    scaled: tl.tuple,
    kept: tl.tuple,
    number: tl.tensor,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Return the first token at which the cumulative weight exceeds `number` of the total."""
    _, _, _, size, _, _ = scaled
    least, ties = kept
    zero = tl.full([], 0.0, tl.float32)
    total, met = zero, zero
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        weights, bits = _weights(scaled, columns, ADDED, MASKED)
        weights, met = _kept(weights, bits, least, ties, met)
        total += tl.sum(weights, axis=0)
    target = number * total
    token = tl.full([], -1, tl.int32)
    passed, met, found, start = zero, zero, token + 0 > 0, token + 1
    while (start < size) & (found == 0):
        columns = start + tl.arange(0, TILE)
        weights, bits = _weights(scaled, columns, ADDED, MASKED)
        weights, met = _kept(weights, bits, least, ties, met)
        beyond = (passed + tl.cumsum(weights, axis=0) > target) & (weights > 0)
        first = tl.min(tl.where(beyond, columns, size), axis=0)
        found = first < size
        # Rounding may leave the number beyond all: then the last one that can be drawn.
        last = tl.max(tl.where(weights > 0, columns, -1), axis=0)
        token = tl.where(found, first, tl.maximum(token, last))
        passed += tl.sum(weights, axis=0)
        start += TILE
    return token


@triton.jit
def sample_kernel(  # noqa: PLR0913 - a kernel's arguments are flat
    logits: tl.tensor,
    added: tl.tensor,
    mask: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    finites: tl.tensor,
    size: tl.tensor,
    mask_width: tl.tensor,
    ADDED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write one row's token."""
    index = tl.program_id(0).to(tl.int64)
    logits, added, mask = logits + index * size, added + index * size, mask + index * mask_width
    finite, best, token = _likeliest((logits, added, mask, size), ADDED, MASKED, TILE)
    token = tl.where(finite, token, -1)
    temperature = tl.load(temperatures + index)
    if (temperature > 0) & (token >= 0):
        # Weights are powers of 2. Were this infinite, the best one would be 0 * inf.
        sharpness = tl.minimum(1.4426950408889634 / temperature, 1e30)
        scaled = (logits, added, mask, size, best, sharpness)  # flat: triton 3.6 does not nest
        filters = (tl.load(top_ks + index), tl.load(top_ps + index), tl.load(min_ps + index))
        kept = _filters(scaled, filters, ADDED, MASKED, TILE)
        position = tl.load(positions + index)
        low = (position & 0xFFFFFFFF).to(tl.uint32)
        high = (position >> 32).to(tl.uint32)
        drawn, _, _, _ = tl.philox(tl.load(seeds + index), low, high, low * 0, low * 0)
        number = (drawn >> 8).to(tl.float32) * 5.9604644775390625e-08  # 24 bits: exact in float32
        token = _draw(scaled, kept, number, ADDED, MASKED, TILE)
    tl.store(tokens + index, token)
    tl.store(finites + index, finite)


def sample_launch(
    logits: torch.Tensor,
    rows: SamplingRows,
    tokens: torch.Tensor,
    finite: torch.Tensor,
    added: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> Launch:
    """Return the launch of `sample`; raises as it does."""
    count, vocab = logits.shape
    check("logits", logits, (count, vocab), *STORAGE)
    rows.check(count)
    check("tokens", tokens, (count,), torch.int32)
    check("finite", finite, (count,), torch.bool)
    if added is not None:
        check("added", added, (count, vocab), torch.float32)
    if mask is not None:
        check("mask", mask, (count, -(-vocab // 32)), torch.int32)
    tile = min(WIDEST_TILE, triton.next_power_of_2(vocab))
    arguments = {
        "logits": logits,
        "added": logits if added is None else added,
        "mask": logits if mask is None else mask,
        "temperatures": rows.temperature,
        "top_ks": rows.top_k,
        "top_ps": rows.top_p,
        "min_ps": rows.min_p,
        "seeds": rows.seed,
        "positions": rows.position,
        "tokens": tokens,
        "finites": finite,
        "size": vocab,
        "mask_width": -(-vocab // 32),
        "ADDED": added is not None,
        "MASKED": mask is not None,
        "TILE": tile,
    }
    return Launch(sample_kernel, (count,), arguments, Tuning(warps=min(16, max(1, tile // 256))))


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    tokens: torch.Tensor,
    finite: torch.Tensor,
    added: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> None:
    """Write a token and whether all its logits were finite for each of S rows.

    logits: [S, vocab], float32, bfloat16 or float16; tokens: int32 [S], -1 where a logit was not
    finite or nothing may be drawn; finite: bool [S]; added: float32 [S, vocab], penalties and
    biases; mask: int32 [S, vocab / 32 rounded up], bit i of word w allows token 32 w + i. Ties go
    to the lower token id. Raises ValueError for other shapes or dtypes.
    """
    sample_launch(logits, rows, tokens, finite, added, mask).run()
