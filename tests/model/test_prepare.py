import subprocess
import sys

import pytest
from safetensors.numpy import load_file
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
    [("nonsense", "is no model"), ("/nowhere/x.gguf", "no file"), ("/tmp", r"no config\.json")],
)
def test_what_is_no_model_is_named(name, named):
    with pytest.raises(ModelUnavailable, match=named):
        prepare(name)


def test_the_absence_of_the_embedded_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(module.EMBEDDED, "smollm2-135m", "no_such_package")
    with pytest.raises(ModelUnavailable, match="pip install"):
        prepare("smollm2-135m")


@pytest.mark.model
def test_the_embedded_model_is_converted_once(tmp_path):
    calls = []
    directory = prepare("smollm2-135m", lambda *call: calls.append(call))
    assert len(calls) == 272
    assert directory.parent == cache_directory() / "models"
    assert {path.name for path in directory.iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors",
    }
    spec = load_spec(directory)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.rope_theta, spec.norm_eps, spec.max_context) == (100000.0, 1e-5, 8192)
    calls.clear()
    assert prepare(str(embedded_gguf("smollm2-135m"))) == directory
    assert calls == []
    assert len(list(directory.parent.iterdir())) == 1, "no partial directory is left"


@pytest.mark.model
def test_a_failed_conversion_leaves_nothing(monkeypatch):
    def fail(done, total, name):
        if done > total // 2:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepare("smollm2-135m", fail)
    assert list((cache_directory() / "models").iterdir()) == []


@pytest.mark.model
def test_conversion_does_not_import_torch(tmp_path):
    code = (
        "import sys; from agentserve.model.prepare import prepare; "
        "print(prepare('smollm2-135m')); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tensors = load_file(f"{done.stdout.strip()}/model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (49152, 576)
