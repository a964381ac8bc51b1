import weakref

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, load_decoder, save_random, shuffled_tables

from agentserve.engine.plan import Row
from agentserve.model.batch import build_step
from agentserve.model.cpu_forward import CpuForward
from agentserve.model.decoder import Decoder
from agentserve.model.torch_forward import TorchForward
from agentserve.model.weights import load_weights


def logits(decoder, tables, rows, tokens):
    plan = [Row(slot, start, count, sample=True) for slot, start, count in rows]
    step = build_step(plan, np.asarray(tokens, np.int32), tables, decoder.cache.shape[4])
    return decoder.forward(step).clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_operations_give_the_logits_and_kv_of_the_cpu_kernels(family, tmp_path):
    save_random(family, tmp_path)
    kernels = load_decoder(tmp_path)
    weights = load_weights(tmp_path, kernels.spec, torch.float32)
    plain = Decoder(kernels.spec, weights, torch.zeros_like(kernels.cache), TorchForward)
    kernels.cache.zero_()
    tables = shuffled_tables(kernels, 3)
    random = np.random.default_rng(5)
    steps = (
        [(0, 0, 60)],  # a chunk from nothing
        [(0, 60, 45), (1, 0, 50)],  # a chunk after a past, beside another
        [(0, 105, 1), (1, 50, 1), (2, 0, 37)],  # single tokens beside a chunk
        [(0, 106, 1), (1, 51, 20), (2, 37, 1)],  # few rows
    )
    for rows in steps:
        tokens = random.integers(0, kernels.spec.vocab_size, sum(count for *_, count in rows))
        expected = logits(kernels, tables, rows, tokens)
        got = logits(plain, tables, rows, tokens)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(plain.cache, kernels.cache, rtol=0, atol=1e-4)


def test_layers_that_are_packed_are_not_kept_a_second_time(tmp_path):
    save_random("llama", tmp_path)
    decoder = load_decoder(tmp_path)
    weights = load_weights(tmp_path, decoder.spec, torch.float32)
    layer = weakref.ref(weights.layers[0].qkv)
    Decoder(decoder.spec, weights, torch.zeros_like(decoder.cache), CpuForward)
    assert layer() is None
    assert weights.layers == []
