"""What `agentserve doctor` says of models that run and models that do not."""

import json
import subprocess
import sys

import pytest

from agentserve.cli import main
from agentserve.cli.inspect import verdict
from agentserve.doctor import check_memory, count_parameters, estimate, examine, inspect_machine
from agentserve.model.prepare import prepare
from agentserve.model.spec import load_spec, parse_spec
from agentserve.sessions.toolformat import FORMATS

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GIB = 1 << 30


@pytest.fixture
def config(tmp_path):
    """Write a model directory that has a config and no weights."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(SMALL | changes))
        return str(tmp_path)

    return write


def test_an_architecture_that_is_not_built_is_named(config):
    report = examine(config(architectures=["GemmaXForCausalLM"]))
    assert not report.runs
    line = verdict(report)
    assert line.startswith("does not run: ")
    assert ": architecture GemmaXForCausalLM is not supported" in line


def test_a_missing_weight_file_is_named(config):
    report = examine(config())
    assert not report.runs
    assert "no model.safetensors" in report.reason


def test_a_missing_shard_is_named(config, tmp_path):
    directory = config()
    shards = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    (tmp_path / "one.safetensors").touch()
    assert "two.safetensors" in examine(directory).reason


def test_a_name_that_is_no_model_says_what_would_be_one():
    report = examine("no such model")
    assert not report.runs
    assert "smollm2-135m" in report.reason


@pytest.mark.parametrize("model", ["/nonexistent", "/nowhere/x.gguf", "owner/name"])
def test_the_verdict_on_what_cannot_be_had_is_short_and_names_it_once(model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = verdict(examine(model))
    assert line.startswith(f"does not run: {model}: ")
    assert line.count(model) == 1
    assert len(line) < 120


def test_kv_is_what_the_weights_leave_and_no_more_than_was_asked_for():
    spec = parse_spec(json.dumps(SMALL).encode())
    figures = estimate(spec, "auto", memory_free=GIB, kv_bytes=0)
    assert figures.weight_bytes == 2 * figures.parameters
    assert figures.kv_token_bytes == 2 * 2 * 2 * 8 * 2  # K and V, layers, heads, dims, bytes
    assert figures.kv_tokens * figures.kv_token_bytes <= (GIB - figures.weight_bytes) * 2 // 5
    left = GIB - figures.weight_bytes - figures.kv_tokens * figures.kv_token_bytes
    assert 0 < figures.host_tokens * figures.kv_token_bytes <= left // 5
    asked = estimate(spec, "float32", memory_free=GIB, kv_bytes=1 << 20, host_bytes=1 << 19)
    assert asked.host_tokens == (1 << 19) // asked.kv_token_bytes
    assert estimate(spec, "auto", memory_free=GIB, host_bytes=0).host_tokens == 0
    assert asked.weight_bytes == 2 * figures.weight_bytes
    assert asked.kv_tokens == (1 << 20) // asked.kv_token_bytes


def test_memory_that_is_too_small_is_a_reason():
    spec = parse_spec(json.dumps(SMALL).encode())
    with pytest.raises(ValueError, match="memory is too small"):
        check_memory(estimate(spec, "auto", memory_free=30_000, kv_bytes=0), 30_000)


def test_the_machine_has_cores_memory_and_versions():
    machine = inspect_machine()
    assert machine.cores >= 1
    assert 0 < machine.memory_free <= machine.memory
    assert machine.versions["msgspec" if "msgspec" in machine.versions else "tokenizers"]


def test_a_model_that_does_not_run_exits_with_1_in_words_and_in_json(config, capsys):
    directory = config(architectures=["GemmaXForCausalLM"])
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as done:
            main(["doctor", directory, *more])
        assert done.value.code == 1
    words, document = capsys.readouterr().out.split("\n{", 1)
    assert words.startswith("does not run: ")
    assert json.loads("{" + document)["runs"] is False


@pytest.mark.model
def test_the_embedded_model_runs_and_its_parameters_are_those_in_its_weights(capsys):
    with pytest.raises(SystemExit) as done:
        main(["doctor"])
    assert done.value.code == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("runs: smollm2-135m: weights 256.6 MiB (269030016 bytes, bfloat16), ")
    assert first.endswith(" tokens")
    assert any("tool calls" in line for line in rest)
    assert count_parameters(load_spec(prepare("smollm2-135m"))) == 134_515_008


@pytest.mark.model
def test_doctor_imports_no_torch():
    script = (
        "import sys\n"
        "from agentserve.doctor import examine\n"
        "print(examine('smollm2-135m').runs, 'torch' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.split() == ["True", "False"]


def test_families_are_told_in_words_and_in_json(capsys):
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as done:
            main(["doctor", "--families", *more])
        assert done.value.code == 0
    words, document = capsys.readouterr().out.rsplit("\n[", 1)
    assert words.startswith("json: model smollm2-135m\n  tool result only adds\n")
    rows = json.loads("[" + document)
    assert {row["format"] for row in rows} == set(FORMATS)
    assert rows[0]["on_result"] is True
    untested = [row["format"] for row in rows if not row["tested"]]
    assert all(f"{name}: not tested" in words for name in untested)


def test_an_unknown_tool_format_is_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit) as done:
        main(["serve", "--tool-format", "hermess"])
    assert done.value.code == 2
    assert "hermes, json" in " ".join(capsys.readouterr().err.split())
