"""The same weights for everybody: SmolLM2's installed GGUF, widened once and rounded to bfloat16.

`smollm2-bf16/` is for what reads safetensors, `smollm2-bf16.gguf` for llama.cpp,
`smollm2-f16.gguf` for OpenVINO. All matrices hold the same numbers: bfloat16 fits into float16
except for values below 6e-8. Vectors (norms) stay float32 in the GGUF files, as llama.cpp's own
converter leaves them.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

from agentserve.model.prepare import embedded_gguf, prepare

MODEL = "smollm2-135m"
FILE_TYPES = {"f16": 1, "bf16": 32}  # `general.file_type` of the GGUF format
WRITERS_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def make_weights(directory: Path) -> None:
    """Write what is missing of the three; each appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    _once(directory / "smollm2-bf16", lambda path: write_safetensors(prepare(MODEL), path))
    for dtype in FILE_TYPES:
        target = directory / f"smollm2-{dtype}.gguf"
        _once(target, lambda path, dtype=dtype: write_gguf(embedded_gguf(MODEL), path, dtype))


def _once(target: Path, write: Any) -> None:
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    write(partial)
    os.rename(partial, target)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, ties to even; returns the upper halves of the float32 patterns."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values that bfloat16 keeps of these."""
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def write_safetensors(prepared: Path, directory: Path) -> None:
    """Copy a prepared float32 model with every tensor rounded to bfloat16."""
    directory.mkdir()
    for file in prepared.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, directory / file.name)
    config = json.loads((prepared / "config.json").read_text())
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    source = (prepared / "model.safetensors").open("rb")
    target = (directory / "model.safetensors").open("wb")
    with source, target:
        size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(size))
        tensors = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        tensors.sort(key=lambda pair: pair[1]["data_offsets"])
        _write_header(target, tensors)
        for _, entry in tensors:
            start, end = entry["data_offsets"]
            source.seek(8 + size + start)
            data = np.frombuffer(source.read(end - start), dtype=np.float32)
            target.write(bfloat16_bits(data).data)


def _write_header(target: Any, tensors: list[tuple[str, dict[str, Any]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in tensors:
        if entry["dtype"] != "F32":
            raise ValueError(f"{name} is {entry['dtype']}, not F32")
        start, end = end, end + 2 * int(np.prod(entry["shape"]))
        header[name] = {"dtype": "BF16", "shape": entry["shape"], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little") + text)


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """Copy a GGUF with its matrices in `dtype`, after rounding them to bfloat16."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, _value(reader.get_field("general.architecture")))
    writer.add_file_type(FILE_TYPES[dtype])
    for field in reader.fields.values():
        if not field.name.startswith(WRITERS_OWN):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, _value(field), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, values)
        elif dtype == "f16":
            writer.add_tensor(tensor.name, rounded(values).astype(np.float16))
        else:
            writer.add_tensor(
                tensor.name,
                bfloat16_bits(values).view(np.uint8),
                raw_dtype=GGMLQuantizationType.BF16,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value(field: Any) -> Any:
    return field.contents()
