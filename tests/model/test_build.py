"""Which device the model goes to, and how much memory its KV gets there."""

import pytest
import torch
from tiny_models import save_random

from agentserve.config import ModelSettings
from agentserve.model import memory
from agentserve.model.build import chosen_device, load_runner

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch):
    """A machine that has, as far as torch says, a GPU of some compute capability, or none."""

    def found(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return found


@pytest.mark.parametrize(
    ("capability", "name", "device"),
    [
        (None, "auto", "cpu"),
        (None, "cpu", "cpu"),
        ((9, 0), "auto", "cuda"),
        ((9, 0), "cuda", "cuda"),
        ((9, 0), "cpu", "cpu"),
        ((8, 0), "auto", "cuda"),
        ((7, 5), "auto", "cpu"),
    ],
)
def test_a_gpu_is_taken_where_one_can_be_used_and_nobody_said_otherwise(
    gpus, capability, name, device
):
    gpus(capability)
    assert chosen_device(name) == device


@pytest.mark.parametrize(
    ("capability", "message"),
    [(None, "finds no CUDA device"), ((7, 5), r"compute capability 7\.5 is below 8\.0")],
)
def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_refused_with_the_reason(
    gpus, capability, message
):
    gpus(capability)
    with pytest.raises(ValueError, match=f"device cuda: .*{message}.*use --device cpu"):
        chosen_device("cuda")


def test_any_other_device_is_refused():
    with pytest.raises(ValueError, match="'tpu' is not one of auto, cpu, cuda"):
        chosen_device("tpu")


def test_the_device_is_refused_before_weights_are_read(gpus, tmp_path):
    gpus(None)
    save_random("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="finds no CUDA device"):
        load_runner({"directory": str(tmp_path), "device": "cuda"})


def test_kv_takes_most_of_a_gpu_and_leaves_what_steps_need(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 100 * GIB)
    record = 2 << 20
    device, host = memory.tier_blocks(ModelSettings("x"), record, 16, gpu_free=120 * GIB)
    assert device * record <= (120 * GIB - memory.GPU_SPARE) * 0.9
    assert device * record > 100 * GIB
    assert host * record == 40 * GIB
    asked = ModelSettings("x", kv_bytes=8 * GIB, host_bytes=0)
    assert memory.tier_blocks(asked, record, 16, gpu_free=120 * GIB) == (4096, 0)


def test_more_kv_than_a_gpu_has_free_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 100 * GIB)
    with pytest.raises(ValueError, match=r"more than the .* bytes that are free"):
        memory.tier_blocks(ModelSettings("x", kv_bytes=9 * GIB), 2 << 20, 16, gpu_free=8 * GIB)
    with pytest.raises(ValueError, match="holds 0 blocks"):
        memory.tier_blocks(ModelSettings("x"), 2 << 20, 16, gpu_free=GIB)
