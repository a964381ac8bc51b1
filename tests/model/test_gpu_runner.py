"""That the GPU runner waits for nothing before `collect`; what it computes: test_gpu_model.py."""

import pytest
import torch
from agentserve_kernels.gpu.launch import Launch
from msgspec.structs import replace
from runner_cases import FEATURES, mask_of
from tiny_models import load_decoder, save_random
from torch.utils._python_dispatch import TorchDispatchMode

from agentserve.engine.plan import SAMPLED, Copy, Row, SlotAdd, StepPlan, TableAppend, pack
from agentserve.model.decoder import Decoder, empty_cache
from agentserve.model.gpu_forward import GpuForward
from agentserve.model.gpu_runner import ROW, GpuRunner
from agentserve.model.spec import load_spec
from agentserve.model.weights import load_weights


class Crossings(TorchDispatchMode):
    """Writes down the operations that touch the host's tensors and the device's."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        tensors = torch.utils._pytree.tree_leaves((arguments, keywords))
        devices = {t.device.type for t in tensors if isinstance(t, torch.Tensor)}
        if len(devices) > 1:
            self.found.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """On the meta device there is nothing to be read: whatever waits for a value raises."""
    monkeypatch.setattr(Launch, "run", lambda self: None)
    save_random("qwen3 tied, with biases", tmp_path)
    spec = load_spec(tmp_path)
    weights = load_weights(tmp_path, spec, torch.bfloat16, "meta")
    cache = empty_cache(spec, 32, 16, torch.bfloat16, "meta")
    decoder = Decoder(spec, weights, cache, GpuForward)
    made = GpuRunner(decoder, model="tiny", identity="x", max_slots=4)
    made._arrivals = [torch.empty(4 * ROW, dtype=torch.int32, device="meta") for _ in range(2)]
    return made


def crossings(work, *arguments):
    with Crossings() as crossed:
        result = work(*arguments)
    return result, crossed.found


def test_a_step_takes_one_copy_from_the_host_and_waits_for_nothing(runner):
    added = [
        SlotAdd(0, 0, FEATURES["temperature"], 3),
        SlotAdd(1, 0, FEATURES["frequency"], 3, pack([5, 6])),
        SlotAdd(2, 0, replace(FEATURES["bias"], logprobs=3), 3, b"", pack([9])),
    ]
    tables = [TableAppend(slot, 0, [slot, slot + 10]) for slot in range(3)]
    copies = [Copy(1, 0, 20, 21, 7)]
    prefill = [Row(0, 0, 20, True), Row(1, 2, 5, False), Row(2, 0, 1, True)]
    decode = [Row(slot, 20, 1, True) for slot in range(3)]
    mixed = [Row(0, 21, 1, True), Row(1, 7, 9, True)]
    for step, plan in enumerate(
        (
            StepPlan(1, [], added, tables, copies, prefill, pack([1] * 26)),
            StepPlan(2, [], [], [], [], decode, pack([SAMPLED] * 3)),
            StepPlan(3, [], [], [], [], mixed, pack([SAMPLED] + [1] * 9)),
            StepPlan(4, [], [], [TableAppend(2, 0, [30])], [], [], b""),
        )
    ):
        handle, found = crossings(runner.launch, plan)
        assert found == ["aten.copy_.default"], step
        masks = {0: mask_of([3])} if step == 1 else {}
        _, found = crossings(runner.sample, handle, masks)
        assert found == (["aten.copy_.default"] if masks else []), step


def test_only_a_decoder_on_the_kernels_of_a_gpu_is_taken(tmp_path):
    save_random("llama", tmp_path)
    with pytest.raises(TypeError, match="not a GpuForward"):
        GpuRunner(load_decoder(tmp_path), model="tiny", identity="x", max_slots=2)
