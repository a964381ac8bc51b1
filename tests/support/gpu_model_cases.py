"""Checks of the GPU's forward pass, runner and graphs on tiny random models.

    TRITON_INTERPRET=1 python gpu_model_cases.py [NAME ... | --share I N]

As gpu_cases.py, on a GPU or in Triton's interpreter; also needs transformers. What they are
compared with runs in plain torch operations on the CPU.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import runner_cases
import torch
from engine_driver import Driver as EngineDriver
from gpu_attention_cases import dtypes
from gpu_cases import main
from overlap import assert_nothing_is_left, ends
from tiny_models import SIZES, run_rows, save_random, shuffled_tables

from agentserve.config import EngineSettings
from agentserve.engine.messages import Cancel, Close
from agentserve.engine.plan import Row, SamplingParams
from agentserve.model.accelerator import open_accelerator
from agentserve.model.batch import build_step
from agentserve.model.decoder import Decoder, empty_cache
from agentserve.model.gpu_forward import GpuForward, inputs, step_arrays
from agentserve.model.gpu_runner import GpuRunner
from agentserve.model.graphs import DecodeGraphs
from agentserve.model.runner import TorchRunner
from agentserve.model.spec import load_spec
from agentserve.model.torch_forward import TorchForward
from agentserve.model.upload import Uploader
from agentserve.model.weights import load_weights

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.2}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NORMED, BIASED = "qwen3 tied, with biases", "llama with every bias"


@functools.cache
def saved(family, layers=2):
    """A random checkpoint, and transformers' model of it."""
    directory = Path(tempfile.mkdtemp())
    return directory, save_random(family, directory, num_hidden_layers=layers, **SMALL)


def decoder(family, device, dtype=torch.float32, layers=2, blocks=40, forward=GpuForward):
    """What was never written is NaN, so that a read too far shows."""
    directory, _ = saved(family, layers)
    spec = load_spec(directory)
    weights = load_weights(directory, spec, dtype, device)
    cache = empty_cache(spec, blocks, 16, dtype, device).fill_(float("nan"))
    return Decoder(spec, weights, cache, forward)


def tokens_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=generator)


def mixed_steps_give_the_logits_of_transformers(device):
    halves = [dtype for dtype in dtypes(device) if dtype is not torch.float32]
    for family, dtype in [(NORMED, torch.float32), *((BIASED, each) for each in halves)]:
        one_mixed_sequence(device, family, dtype)


def one_mixed_sequence(device, family, dtype):
    """Chunks after a past, single tokens, a new prompt, and a prefix that another one computed."""
    _, reference = saved(family)
    first, second = tokens_of(52, 1), tokens_of(52, 2)
    shared = torch.cat((first[:32], second[32:]))  # two blocks of the first sequence
    with torch.no_grad():
        ahead, behind, beside = (reference(t[None]).logits[0] for t in (first, second, shared))
    assert ahead.std() > 0.5
    native = decoder(family, device, dtype)
    tables = shuffled_tables(native, 4)
    tables[3, :2] = tables[0, :2]
    for rows, given, expected in (
        ([(0, 0, 33), (1, 0, 20)], (first[:33], second[:20]), (ahead[:33], behind[:20])),
        (
            [(1, 20, 1), (0, 33, 18), (3, 32, 7), (2, 0, 1)],
            (second[20:21], first[33:51], shared[32:39], first[:1]),
            (behind[20:21], ahead[33:51], beside[32:39], ahead[:1]),
        ),
        ([(3, 39, 1), (0, 51, 1)], (shared[39:40], first[51:]), (beside[39:40], ahead[51:])),
    ):
        got = run_rows(native, tables, rows, torch.cat(given)).cpu()
        torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=TOLERANCE[dtype])


def long_contexts_are_divided_and_give_the_same_logits(device):
    plain = decoder(NORMED, "cpu", forward=TorchForward)
    tables = shuffled_tables(plain, 1)
    tokens = tokens_of(501, 3)
    run_rows(plain, tables, [(0, 0, 500)], tokens[:500])
    native = decoder(NORMED, device)
    native.cache.copy_(plain.cache)
    expected = run_rows(plain, tables, [(0, 500, 1)], tokens[500:])
    got = run_rows(native, tables, [(0, 500, 1)], tokens[500:]).cpu()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(native.cache.cpu(), plain.cache, rtol=0, atol=1e-4, equal_nan=True)


def replays_depend_on_their_buffers_only_and_fill_rows_touch_nothing(device):
    """Three sequences decode: in a graph of four rows twice, and in two other batches."""
    plain = decoder(NORMED, "cpu", forward=TorchForward)
    tables = shuffled_tables(plain, 4)
    prompts = [tokens_of(count, count) for count in (21, 16, 35)]
    for slot, tokens in enumerate(prompts):
        run_rows(plain, tables, [(slot, 0, len(tokens))], tokens)
    native = decoder(NORMED, device)
    native.cache.copy_(plain.cache)
    accelerator, forward = open_accelerator(native.cache.device), native.implementation
    upload, on_device = Uploader(accelerator), tables.to(device)
    graphs = DecodeGraphs(
        accelerator, lambda packed, own: forward.run(inputs(packed, on_device, 0), own), most=4
    )
    graphs.capture()
    assert torch.equal(native.cache.cpu().isnan(), plain.cache.isnan())  # captures write no KV
    lengths = [len(tokens) for tokens in prompts]
    for slots in ([0, 1, 2], [2, 0, 1], [1], [0, 2]):
        fed = torch.tensor([7 * slot + 1 for slot in slots])
        rows = [Row(slot, lengths[slot], 1, True) for slot in slots]
        expected = run_rows(plain, tables, [(r.slot, r.start, 1) for r in rows], fed)
        step = build_step(rows, fed.numpy().astype(np.int32), tables, 16)
        with torch.inference_mode():
            logits = graphs.replay(upload(graphs.fill(step_arrays(step))))[: len(rows)].clone()
        torch.testing.assert_close(logits.float().cpu(), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(
            native.cache.cpu(), plain.cache, rtol=0, atol=1e-4, equal_nan=True
        )
        for slot in slots:
            lengths[slot] += 1


def runner(device, *, gpu=True, graphs=False, blocks=40, slots=8, host_blocks=0):
    forward = GpuForward if gpu else TorchForward
    made = decoder(NORMED, device, layers=1, blocks=blocks, forward=forward)
    names = {"model": "tiny", "identity": "x", "max_slots": slots, "host_blocks": host_blocks}
    if not gpu:
        return TorchRunner(made, **names), made.cache
    return GpuRunner(made, **names, graphs=graphs), made.cache


def sequences_in_any_batch_give_the_tokens_of_each_alone(device):
    native, _ = runner(device, graphs=True)
    runner_cases.batched_sequences_give_the_tokens_that_each_gives_alone(native, 3, 4)


def a_neighbour_with_any_feature_changes_nothing(device):
    native, _ = runner(device)
    for feature in ("top_p", "repetition", "bias", "grammar"):
        runner_cases.a_plain_neighbour_is_not_touched(native, feature, [1], [(1, 0)], 3)


def features_survive_a_preemption(device):
    native, _ = runner(device, graphs=True, slots=4)
    for feature in ("min_p", "frequency"):
        runner_cases.a_feature_gives_the_same_tokens_after_a_preemption(native, feature, 4)


def rows_slots_and_copies_are_those_of_the_plan(device):
    native, cache = runner(device)
    runner_cases.a_mask_binds_its_row_only(native)
    runner_cases.a_drop_of_another_generation_is_refused(runner(device)[0])
    runner_cases.a_mask_that_allows_nothing_leaves_its_row_without_a_token(runner(device)[0])
    runner_cases.rows_that_do_not_reach_the_end_give_no_token(runner(device)[0])
    native, cache = runner(device)
    runner_cases.a_row_with_a_non_finite_logit_fails_alone(native, cache)
    native, cache = runner(device)
    runner_cases.a_copied_block_is_as_good_as_the_original(native, cache, 3)


def tokens_stay_on_the_device_with_and_without_graphs(device):
    for graphs, features in ((False, ["frequency"]), (True, ["temperature", "repetition"])):
        native, _ = runner(device, graphs=graphs, slots=4)
        runner_cases.tokens_that_only_the_device_knows_are_what_it_sampled(native, features)


def penalties_and_biases_are_those_of_the_host(device):
    params = SamplingParams(
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={7: 1.5, 11: -50.0},
    )
    prompt = runner_cases.prompt(11, 12)
    plain, native = (
        runner_cases.Driver(each).generate(runner_cases.Sequence(prompt, params), 8)
        for each in (runner("cpu", gpu=False)[0], runner(device)[0])
    )
    assert native == plain


def log_probabilities_are_those_of_transformers(device):
    features = ("temperature", "repetition", "bias", "grammar")
    for graphs in (False, True):
        native, _ = runner(device, graphs=graphs)
        runner_cases.log_probabilities_are_the_model_s_own(native, theirs, features)


def theirs(tokens):
    with torch.no_grad():
        return saved(NORMED, 1)[1](torch.tensor([tokens])).logits[0, -1].numpy()


def an_engine_one_step_ahead_gives_what_one_without_gives(device):
    """Stops that are seen late, a cancel, a fork of a log, KV that leaves and comes back."""
    plain, native = (
        runner(where, gpu=gpu, graphs=gpu, blocks=8, slots=4, host_blocks=24)[0]
        for where, gpu in (("cpu", False), (device, True))
    )
    expected = played(plain, None)
    stop = expected[1][0][3]
    now, late = played(plain, stop), played(native, stop)
    assert late == now
    assert now[1] == (expected[1][0][: expected[1][0].index(stop)], "stop", stop)


def played(runner, stop):
    """Turns of three sequences in 8 blocks of 16: what each gave, and how it ended."""
    settings = EngineSettings(token_budget=40, check_invariants=True)
    d = EngineDriver(runner=lambda **_: runner, settings=settings)
    stops = [] if stop is None else [stop]
    first = d.submit(1, runner_cases.prompt(1, 37), max_tokens=8, stop_ids=stops)
    second = d.submit(2, runner_cases.prompt(2, 20), max_tokens=5)
    d.finish(first)
    log = runner_cases.prompt(1, 37) + d.output[first]
    third = d.submit(1, runner_cases.prompt(3, 6), keep=len(log), max_tokens=3)
    doomed = d.submit(3, runner_cases.prompt(4, 30), max_tokens=30)
    d.finish(second, third)
    d.engine.apply(Cancel(doomed))
    d.drain()
    assert d.finished[doomed].reason == "cancelled"
    d.offload(1)
    again = d.submit(1, runner_cases.prompt(5, 4), keep=len(log) + 6, max_tokens=3)
    d.drain()
    assert d.started[again].host > 0
    d.engine.apply(Close(1))
    d.drain()
    assert_nothing_is_left(d)
    return {turn: (end[0], end[1], end[4]) for turn, end in ends(d).items() if turn != doomed}


CASES = (
    mixed_steps_give_the_logits_of_transformers,
    long_contexts_are_divided_and_give_the_same_logits,
    replays_depend_on_their_buffers_only_and_fill_rows_touch_nothing,
    sequences_in_any_batch_give_the_tokens_of_each_alone,
    a_neighbour_with_any_feature_changes_nothing,
    features_survive_a_preemption,
    rows_slots_and_copies_are_those_of_the_plan,
    tokens_stay_on_the_device_with_and_without_graphs,
    penalties_and_biases_are_those_of_the_host,
    log_probabilities_are_those_of_transformers,
    an_engine_one_step_ahead_gives_what_one_without_gives,
)

if __name__ == "__main__":
    main(CASES)
