"""What each kernel must compute, in plain torch operations; they run on any device."""

import torch

from agentserve_kernels.tensors import Chunk, DecodeRows, HeadNorm, Pages, Placement, Rotary


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x @ weight.T + bias in float32."""
    return torch.nn.functional.linear(x, weight.float(), bias)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension, in float32."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate_reference(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, heads, D] by cos and sin [T, D / 2]."""
    low, high = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def kv_write_reference(
    qkv: torch.Tensor,
    pages: Pages,
    place: Placement,
    rotary: Rotary,
    norm: HeadNorm | None,
) -> torch.Tensor:
    """Do what `kv_write` does, with torch operations; return the queries [T, heads, D]."""
    cache, layer = pages.cache, pages.layer
    kv_heads, block_size, dim = cache.shape[3:]
    heads = qkv.view(qkv.shape[0], -1, dim)
    query, key, value = torch.tensor_split(heads, (-2 * kv_heads, -kv_heads), dim=1)
    if norm is not None:
        query = torch.nn.functional.rms_norm(query, (dim,), norm.query, norm.eps)
        key = torch.nn.functional.rms_norm(key, (dim,), norm.key, norm.eps)
    cos, sin = rotary.cos[place.positions], rotary.sin[place.positions]
    offsets = place.positions % block_size
    key = rotate_reference(key, cos, sin)
    cache[place.blocks, layer, 0, :, offsets] = key.to(cache.dtype)
    cache[place.blocks, layer, 1, :, offsets] = value.to(cache.dtype)
    return rotate_reference(query, cos, sin)


def gather_reference(pages: Pages, slot: int, length: int) -> torch.Tensor:
    """Return keys and values [2, kv_heads, length, D] in float32 of one sequence."""
    table = pages.tables[slot, : -(-length // pages.cache.shape[4])].long()
    blocks = pages.cache[table, pages.layer]
    _, _, kv_heads, _, dim = blocks.shape
    return blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length].float()


def paged_decode_reference(query: torch.Tensor, pages: Pages, decode: DecodeRows) -> torch.Tensor:
    """Return the attention outputs [N, heads, D] of the decode rows, with torch operations."""
    outputs = []
    for row, slot, length in zip(
        decode.rows.tolist(), decode.slots.tolist(), decode.lengths.tolist(), strict=True
    ):
        keys, values = gather_reference(pages, slot, length)
        heads = query[row].view(keys.shape[0], -1, query.shape[2])
        weights = torch.softmax(heads @ keys.transpose(1, 2) / query.shape[2] ** 0.5, dim=-1)
        outputs.append((weights @ values).view(-1, query.shape[2]))
    return torch.stack(outputs)


def paged_prefill_reference(query: torch.Tensor, pages: Pages, chunk: Chunk) -> torch.Tensor:
    """Return the attention outputs [count, heads, D] of the chunk, with torch operations."""
    end = chunk.start + chunk.count
    keys, values = gather_reference(pages, chunk.slot, end)
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    rows = query[chunk.row : chunk.row + chunk.count].transpose(0, 1)
    scores = rows @ keys.transpose(1, 2) / query.shape[2] ** 0.5
    future = torch.arange(end) > torch.arange(chunk.start, end)[:, None]
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return torch.bmm(weights, values).transpose(0, 1)
