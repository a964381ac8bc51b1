"""How each row of a batch is sampled, as tensors on the device, and what must come of it."""

from dataclasses import dataclass

import torch

from agentserve_kernels.tensors import check

DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
}
ROUND = (0xD2511F53, 0xCD9E8D57)  # Philox 4x32's constants
KEY = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True)
class SamplingRows:
    """One value a row, [S] each. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off.

    A draw depends on (seed, position) alone. float32 but top_k: int32; seed, position: int64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    def check(self, count: int) -> None:
        """Raise ValueError unless each has `count` values of the documented dtype."""
        for name, dtype in DTYPES.items():
            check(name, getattr(self, name), (count,), dtype)


def philox(seed: int, position: int) -> int:
    """Return the first word of Philox 4x32-10 of key `seed` and counter `position`."""
    counter = [position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, 0, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = ROUND[0] * counter[0], ROUND[1] * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(word + step) & 0xFFFFFFFF for word, step in zip(key, KEY, strict=True)]
    return counter[0]


def sample_reference(
    logits: torch.Tensor,
    rows: SamplingRows,
    added: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, finite) as `sample` must write them; weights are float64 here."""
    finite = torch.isfinite(logits).all(1)
    scores = logits.double() if added is None else logits.double() + added
    if mask is not None:
        columns = torch.arange(logits.shape[1], device=logits.device)
        allowed = mask.long()[:, columns // 32] >> columns % 32 & 1
        scores = scores.masked_fill(allowed == 0, float("-inf"))
    tokens = [
        _one(scores[i], rows, i) if finite[i] and scores[i].max() > float("-inf") else -1
        for i in range(logits.shape[0])
    ]
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device), finite


def _one(scores: torch.Tensor, rows: SamplingRows, i: int) -> int:
    temperature = rows.temperature[i].item()
    if temperature == 0:
        return int(scores.argmax())
    weights = torch.exp((scores - scores.max()) / temperature)
    order = torch.argsort(weights, descending=True, stable=True)
    order = order[weights[order] > 0]
    if rows.top_k[i] > 0:
        order = order[: int(rows.top_k[i])]
    if rows.top_p[i] < 1:
        shares = torch.cumsum(weights[order] / weights[order].sum(), 0)
        order = order[: int(torch.searchsorted(shares, rows.top_p[i].double())) + 1]
    kept = order[weights[order] >= rows.min_p[i]].sort().values
    cumulative = torch.cumsum(weights[kept], 0)
    number = (philox(int(rows.seed[i]), int(rows.position[i])) >> 8) / 2**24
    drawn = torch.searchsorted(cumulative, number * cumulative[-1], right=True)
    return int(kept[min(int(drawn), kept.numel() - 1)])
