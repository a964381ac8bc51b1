"""What the GPU's forward pass and the batches of its graphs are, as far as no kernel has to run."""

import numpy as np
import pytest
import torch
from agentserve_kernels.gpu.launch import Launch
from tiny_models import save_random
from torch.utils._python_dispatch import TorchDispatchMode

from agentserve.engine.plan import Row
from agentserve.model.accelerator import Inline
from agentserve.model.batch import build_step
from agentserve.model.decoder import Decoder, empty_cache
from agentserve.model.gpu_forward import GpuForward, inputs, longest_chunk, step_arrays
from agentserve.model.graphs import FILLING, filled, graph_sizes, is_plain_decode
from agentserve.model.spec import load_spec
from agentserve.model.upload import ALIGNMENT, Uploader, layout
from agentserve.model.weights import load_weights


class OnlyThere(TorchDispatchMode):
    """Raises when an operation touches a tensor that is not on the device."""

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.count += 1
        for value in torch.utils._pytree.tree_leaves((arguments, keywords, result)):
            if isinstance(value, torch.Tensor) and value.device != self.device:
                raise AssertionError(f"{function} touches a tensor on {value.device}")
        return result


def a_step(rows):
    tokens = np.zeros(sum(row.count for row in rows), np.int32)
    return build_step(rows, tokens, torch.arange(32, dtype=torch.int32).view(4, 8), 16)


@pytest.mark.parametrize("rows", [[Row(0, 5, 1, True)], [Row(2, 0, 20, True), Row(1, 3, 1, False)]])
def test_a_step_on_the_device_reads_nothing_back_and_takes_nothing_from_the_host(
    rows, monkeypatch, tmp_path
):
    """On the meta device there is nothing to be read, so whatever waits for a value raises."""
    launched = []
    monkeypatch.setattr(Launch, "run", lambda self: launched.append(self.kernel.__name__))
    save_random("qwen3 tied, with biases", tmp_path)
    spec = load_spec(tmp_path)
    weights = load_weights(tmp_path, spec, torch.bfloat16, "meta")
    cache = empty_cache(spec, 32, 16, torch.bfloat16, "meta")
    forward = Decoder(spec, weights, cache, GpuForward).implementation
    step = a_step(rows)
    on_device = {name: torch.from_numpy(a).to("meta") for name, a in step_arrays(step).items()}
    moved = inputs(on_device, step.tables.to("meta"), longest_chunk(step))
    with torch.inference_mode(), OnlyThere("meta") as seen:
        logits = forward.run(moved)
    assert logits.shape == (sum(row.sample for row in rows), spec.vocab_size)
    assert logits.device.type == "meta"
    assert seen.count > 20
    assert launched.count("kv_write_kernel") == spec.layers
    assert launched.count("add_rms_norm_kernel") == 2 * spec.layers + 1


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_graphs_are_captured_for_powers_of_two_and_the_largest_batch(most, sizes):
    assert graph_sizes(most) == sizes


def test_only_steps_of_single_tokens_that_all_sample_are_replayed():
    assert is_plain_decode([Row(0, 5, 1, True), Row(3, 0, 1, True)])
    assert not is_plain_decode([])
    assert not is_plain_decode([Row(0, 5, 1, True), Row(3, 0, 1, False)])
    assert not is_plain_decode([Row(0, 5, 2, True)])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_rows_that_fill_a_batch_have_no_block_no_keys_and_a_slot_of_nobody(count):
    arrays = step_arrays(a_step([Row(slot, 9 + slot, 1, True) for slot in range(count)]))
    full = filled(arrays, 4, spare_slot=64)
    assert list(full) == list(arrays)  # their order is the layout that a graph reads
    for name in FILLING:
        assert full[name].shape == (4,)
        assert full[name][:count].tolist() == arrays[name].tolist()
    assert full["blocks"][count:].tolist() == [-1] * (4 - count)
    assert full["decode_lengths"][count:].tolist() == [0] * (4 - count)
    assert full["decode_slots"][count:].tolist() == [64] * (4 - count)
    assert full["decode_rows"].tolist() == full["sampled"].tolist() == [0, 1, 2, 3]
    assert all(array.size == 0 for name, array in full.items() if name not in FILLING)


def test_every_array_of_an_upload_is_aligned_and_comes_out_as_it_went_in():
    random = np.random.default_rng(1)
    upload = Uploader(Inline(torch.device("cpu")))
    kept = []
    for size in (3, 1, 900, 2, 5000):
        arrays = {
            "ids": random.integers(-9, 9, size),
            "none": np.empty(0, np.float32),
            "odd": random.random((size, 3)).astype(np.float32),
            "words": random.integers(-9, 9, 2 * size + 1).astype(np.int32),
        }
        fields, length = layout(arrays)
        assert all(field.start % ALIGNMENT == 0 for field in fields.values())
        assert length % ALIGNMENT == 0
        kept.append((arrays, upload(arrays)))
    for arrays, packed in kept:  # later uploads have not changed earlier ones
        for name, array in arrays.items():
            assert np.array_equal(packed[name].numpy(), array)
