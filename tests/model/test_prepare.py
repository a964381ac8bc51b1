import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_models import save_random

from agentserve.config import cache_directory
from agentserve.model import prepare as module
from agentserve.model.prepare import ModelUnavailable, embedded_gguf, prepare
from agentserve.model.spec import load_spec


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTSERVE_CACHE", str(tmp_path / "cache"))


def test_a_safetensors_directory_is_taken_as_it_is(tmp_path):
    save_random("llama", tmp_path)
    assert prepare(str(tmp_path)) == tmp_path
    assert not cache_directory().exists()


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("nonsense", "no such model"),
        ("/nowhere/x.gguf", "no such file"),
        ("/tmp", r"no config\.json"),
    ],
)
def test_what_is_no_model_is_named(name, named):
    with pytest.raises(ModelUnavailable, match=named):
        prepare(name)


def test_the_absence_of_the_embedded_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(module.EMBEDDED, "smollm2-135m", "no_such_package")
    with pytest.raises(ModelUnavailable, match="pip install"):
        prepare("smollm2-135m")


@pytest.mark.model
def test_the_embedded_model_is_converted_once_and_without_torch():
    code = (
        "import sys; from agentserve.model.prepare import prepare; "
        "print(prepare('smollm2-135m')); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert directory.parent == cache_directory() / "models"
    assert {path.name for path in directory.iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    spec = load_spec(directory)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.rope_theta, spec.norm_eps, spec.max_context) == (100000.0, 1e-5, 8192)
    with safe_open(directory / "model.safetensors", framework="numpy") as tensors:
        assert len(list(tensors.keys())) == 272
        assert tensors.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
    calls = []
    again = prepare(str(embedded_gguf("smollm2-135m")), lambda *call: calls.append(call))
    assert (again, calls) == (directory, [])
    assert len(list(directory.parent.iterdir())) == 1, "no partial directory is left"


@pytest.mark.model
def test_a_failed_conversion_leaves_nothing():
    def fail(done, total, name):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepare("smollm2-135m", fail)
    assert list((cache_directory() / "models").iterdir()) == []
