"""From safetensors files to the parameters of the decoder, every tensor checked by name."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from agentserve_kernels.tensors import HeadNorm
from safetensors import safe_open

from agentserve.model.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WeightsError(ValueError):
    """A tensor is missing, unexpected or has another shape than the config says."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices [out, in] in the storage dtype; the rest float32."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def head_norm(self, eps: float) -> HeadNorm | None:
        """Return the norm of query and key heads, if the model has one."""
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorm(self.query_norm, self.key_norm, eps)


@dataclass(frozen=True)
class Weights:
    """All parameters; `head` is `embedding` itself where the config ties them."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a decode step reads: everything but an untied embedding."""
        tensors = [self.final_norm, self.head]
        for layer in self.layers:
            tensors += [tensor for tensor in vars(layer).values() if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)


def storage_dtype(name: str) -> torch.dtype:
    """Return the dtype in which weights and KV are kept; arithmetic is float32 with either.

    "auto" is bfloat16 on every CPU: decoding reads half the bytes, and the kernels widen in
    registers, so no AVX512-BF16 is needed (figures: DECISIONS.md, 6).
    """
    if name == "auto":
        return torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that hold the model, in name order.

    Raises FileNotFoundError when there is neither model.safetensors nor an index.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
        return [directory / name for name in sorted(set(shards.values()))]
    single = directory / "model.safetensors"
    if not single.exists():
        raise FileNotFoundError(f"{directory} has no model.safetensors and no shard index")
    return [single]


def load_weights(
    directory: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Weights:
    """Read the parameters to a device; raises WeightsError naming every tensor that is wrong."""
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(directory)
        ]
        checkpoint = _Checkpoint(files, dtype, device)
        weights = _assemble(checkpoint, spec)
        checkpoint.finish(tied=spec.tied_embeddings)
    return weights


class _Checkpoint:
    """Hands out tensors by name and remembers what was wrong, to report it in one error."""

    def __init__(self, files: list[Any], dtype: torch.dtype, device: torch.device | str) -> None:
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self._unused = set(self._files)
        self._problems: list[str] = []
        self._dtype = dtype
        self._device = device

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._take(name, (size,)).to(self._device, torch.float32)

    def matrix(self, inner: int, parts: list[tuple[str, int]]) -> torch.Tensor:
        """Stack the named matrices [rows, inner] on top of each other."""
        shape = (sum(rows for _, rows in parts), inner)
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts:
            stacked[start : start + rows] = self._take(name, (rows, inner))
            start += rows
        return stacked

    def bias(self, present: bool, parts: list[tuple[str, int]]) -> torch.Tensor | None:
        if not present:
            return None
        return torch.cat([self.vector(name, size) for name, size in parts])

    def finish(self, tied: bool) -> None:
        """Raise WeightsError if anything was missing, mis-shaped or left over."""
        # Old checkpoints carry RoPE tables, and tied ones may carry the head twice.
        for name in sorted(self._unused):
            if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")):
                self._problems.append(f"{name} is unexpected")
        if self._problems:
            shown = "; ".join(self._problems[:20])
            more = len(self._problems) - 20
            raise WeightsError(shown + (f"; and {more} more" if more > 0 else ""))

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._unused.discard(name)
        if name not in self._files:
            self._problems.append(f"{name} is missing")
            return torch.zeros(shape)
        file = self._files[name]
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            self._problems.append(f"{name} has shape {found}, expected {shape}")
            return torch.zeros(shape)
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _assemble(checkpoint: _Checkpoint, spec: ModelSpec) -> Weights:
    embedding = checkpoint.matrix(
        spec.hidden_size, [("model.embed_tokens.weight", spec.vocab_size)]
    )
    head = (
        embedding
        if spec.tied_embeddings
        else checkpoint.matrix(spec.hidden_size, [("lm_head.weight", spec.vocab_size)])
    )
    return Weights(
        embedding=embedding,
        layers=list(_layers(checkpoint, spec)),
        final_norm=checkpoint.vector("model.norm.weight", spec.hidden_size),
        head=head,
    )


def _layers(checkpoint: _Checkpoint, spec: ModelSpec) -> Iterator[LayerWeights]:
    hidden, inner, dim = spec.hidden_size, spec.inner_size, spec.head_dim
    query, key = spec.heads * dim, spec.kv_heads * dim
    for index in range(spec.layers):
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        qkv = [("q_proj", query), ("k_proj", key), ("v_proj", key)]
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        norms = [
            checkpoint.vector(f"{attention}{name}.weight", dim) if spec.head_norm else None
            for name in ("q_norm", "k_norm")
        ]
        yield LayerWeights(
            input_norm=checkpoint.vector(at + "input_layernorm.weight", hidden),
            qkv=checkpoint.matrix(hidden, _names(attention, qkv, "weight")),
            qkv_bias=checkpoint.bias(spec.qkv_bias, _names(attention, qkv, "bias")),
            query_norm=norms[0],
            key_norm=norms[1],
            output=checkpoint.matrix(query, [(attention + "o_proj.weight", hidden)]),
            output_bias=checkpoint.bias(spec.output_bias, [(attention + "o_proj.bias", hidden)]),
            mlp_norm=checkpoint.vector(at + "post_attention_layernorm.weight", hidden),
            gate_up=checkpoint.matrix(hidden, _names(mlp, gate_up, "weight")),
            gate_up_bias=checkpoint.bias(spec.mlp_bias, _names(mlp, gate_up, "bias")),
            down=checkpoint.matrix(inner, [(mlp + "down_proj.weight", hidden)]),
            down_bias=checkpoint.bias(spec.mlp_bias, [(mlp + "down_proj.bias", hidden)]),
        )


def _names(prefix: str, parts: list[tuple[str, int]], kind: str) -> list[tuple[str, int]]:
    return [(f"{prefix}{name}.{kind}", size) for name, size in parts]
