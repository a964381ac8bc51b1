"""The host tier: what goes there comes back byte for byte, while steps run, and moved KV computes
the very logits of KV that never moved."""

import gc
import random
import threading

import pytest
import torch
from runner_driver import Driver, Sequence
from tiny_models import SIZES, load_decoder, save_random

from agentserve.engine import copier
from agentserve.engine.copier import Copier
from agentserve.engine.plan import Copy, StepPlan, Traffic
from agentserve.model.build import load_runner
from agentserve.model.copier import ThreadDevice, host_slab, open_device
from agentserve.model.memory import free_memory
from agentserve.model.runner import TorchRunner

RECORD = (3, 2, 2, 16, 24)  # layers, K/V, kv_heads, tokens, dim
BLOCKS, HOST_BLOCKS = 8, 6
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.fixture(params=["cpu", GPU])
def tiers(request):
    """Return a device tier of random records and a host tier of NaN."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn((BLOCKS, *RECORD), generator=generator).to(request.param)
    slab = host_slab(cache, HOST_BLOCKS)
    return cache, slab.fill_(float("nan"))


def save(ticket, source, target, tokens=16):
    return Copy(ticket, 0, source, target, tokens, "save")


def load(ticket, source, target, tokens=16):
    return Copy(ticket, 0, source, target, tokens, "load")


def finish(mover, count):
    """Return the tickets of the next `count` copies that end."""
    tickets = []
    while len(tickets) < count:
        mover.wait(5)
        tickets += mover.poll()
    return tickets


def same_bytes(left, right):
    return torch.equal(left.cpu().view(torch.uint8), right.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [16, 3])
def test_a_record_comes_back_byte_for_byte_and_no_other_is_touched(tiers, dtype, tokens):
    cache, slab = (tier.to(dtype) for tier in tiers)
    cache[1, 0, 0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    cache[5] = float("nan")
    before = cache.clone()
    mover = Copier(open_device(cache, slab))
    mover.submit([save(7, 1, 4, tokens)])
    assert finish(mover, 1) == [7]
    mover.submit([load(8, 4, 5, tokens)])
    assert finish(mover, 1) == [8]
    assert same_bytes(cache[5], before[1])
    others = [block for block in range(BLOCKS) if block != 5]
    assert same_bytes(cache[others], before[others])
    assert slab[[block for block in range(HOST_BLOCKS) if block != 4]].isnan().all()


@pytest.mark.parametrize("seed", range(20))
def test_copies_that_share_slots_have_the_effect_of_one_after_the_other(tiers, seed):
    """Few slots and many copies in flight, so that most of them must wait for another."""
    cache, slab = tiers
    slab[:] = torch.randn(slab.shape, generator=torch.Generator().manual_seed(2))
    near, far = cache.cpu().clone(), slab.clone()
    rng = random.Random(seed)
    mover = Copier(open_device(cache, slab))
    left = tickets = 120
    while left:
        copies = []
        for _ in range(min(left, rng.randint(1, 12))):
            left -= 1
            block, host = rng.randrange(3), rng.randrange(3)
            if rng.random() < 0.5:
                copies.append(save(left, block, host))
                far[host] = near[block]
            else:
                copies.append(load(left, host, block))
                near[block] = far[host]
        mover.submit(copies)
        if rng.random() < 0.5:
            tickets -= len(mover.poll())
    finish(mover, tickets)
    assert same_bytes(cache, near)
    assert same_bytes(slab, far)


def test_every_ticket_is_reported_once_and_traffic_counts_whole_records(tiers):
    cache, slab = tiers
    device = open_device(cache, slab)
    mover = Copier(device)
    assert device.traffic() == Traffic()
    mover.submit([save(1, 0, 0), save(2, 1, 1, tokens=2), save(3, 2, 2)])
    assert sorted(finish(mover, 3)) == [1, 2, 3]
    mover.submit([load(4, 2, 7), load(5, 1, 6)])
    assert sorted(finish(mover, 2)) == [4, 5]
    assert mover.poll() == []
    traffic = device.traffic()
    assert traffic.saved_bytes == 3 * cache[0].nbytes
    assert traffic.loaded_bytes == 2 * cache[0].nbytes
    assert traffic.saved_s > 0
    assert traffic.loaded_s > 0


def test_a_ticket_is_reported_again_only_after_it_was_reported(tiers, monkeypatch):
    monkeypatch.setattr(copier, "REMEMBERED", 3)
    mover = Copier(open_device(*tiers))
    mover.submit([save(1, 0, 0)])
    assert mover.again([1, 2]) == []
    assert finish(mover, 1) == [1]
    assert mover.again([1, 2]) == mover.again([1, 2]) == [1]
    mover.submit([save(ticket, 1, 1) for ticket in (2, 3, 4)])
    finish(mover, 3)
    assert mover.again([1, 2, 3, 4]) == [2, 3, 4]


def test_a_wait_for_nothing_returns(tiers):
    Copier(open_device(*tiers)).wait(3600)


def test_copies_within_a_tier_are_refused(tiers):
    with pytest.raises(ValueError, match="device"):
        Copier(open_device(*tiers)).submit([Copy(1, 0, 0, 1, 16)])


def copier_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kv-copier"]


def test_the_thread_ends_with_its_device_whatever_is_queued():
    earlier = copier_threads()
    cache = torch.zeros((2, 1 << 22))
    device = ThreadDevice(cache, cache.clone())
    for ticket in range(1000):
        device.copy("save", save(ticket, 0, 0))
    last = device.record("save")
    (thread,) = [thread for thread in copier_threads() if thread not in earlier]
    assert not device.done(last)
    del device
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_copy_that_fails_is_an_error_for_whoever_asks():
    cache = torch.zeros((2, 8))
    mover = Copier(ThreadDevice(cache, cache.clone()))
    mover.submit([save(1, 0, 99)])
    with pytest.raises(RuntimeError, match="copies KV") as caught:
        finish(mover, 1)
    assert isinstance(caught.value.__cause__, IndexError)


class Watched(TorchRunner):
    """A runner that keeps the logits of every step."""

    def __init__(self, decoder, **options):
        super().__init__(decoder, model="tiny", identity="x", max_slots=8, **options)
        self.logits = []

    def launch(self, plan):
        handle = super().launch(plan)
        if handle.plan.rows:
            self.logits.append(handle.logits.copy())
        return handle


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_random("llama", path)
    return path


@pytest.fixture
def runner(directory):
    return Watched(load_decoder(directory, num_blocks=24), host_blocks=12)


def prompt(seed, length):
    return random.Random(seed).choices(range(SIZES["vocab_size"]), k=length)


def run_plan(runner, copies=(), **fields):
    plan = StepPlan(0, [], [], [], list(copies), [], b"", **fields)
    handle = runner.launch(plan)
    runner.sample(handle, {})
    return runner.collect(handle)


def move(runner, copies):
    """Run plans until these copies have ended; return the last result."""
    result = run_plan(runner, copies)
    missing = {copy.ticket for copy in copies} - set(result.tickets)
    while missing:
        result = run_plan(runner, wait=True)
        missing -= set(result.tickets)
    return result


def decode(driver, sequence, count):
    while len(sequence.output) < count:
        driver.step([(sequence, len(sequence.tokens) - sequence.computed)])


def test_a_sequence_that_left_and_came_back_has_bitwise_the_logits_of_one_that_stayed(runner):
    driver = Driver(runner)
    stayed = driver.generate(Sequence(prompt(1, 41)), 12)
    expected, runner.logits = runner.logits, []

    moved = Sequence(prompt(1, 41))
    driver.join(moved, 2)
    decode(driver, moved, 5)  # 45 tokens with KV: two full blocks and a tail
    old, valid = moved.blocks, [16, 16, 13]
    slots = [9, 0, 4]
    move(runner, [save(n, *ends) for n, ends in enumerate(zip(old, slots, valid, strict=True))])
    driver.leave(moved)
    driver.step([])
    driver.release(moved)
    runner._decoder.cache[:] = float("nan")
    kept, runner.logits = runner.logits, []
    driver.generate(Sequence(prompt(2, 90)), 8, slot=5)  # takes the blocks that were left

    runner.logits = kept
    driver.free_blocks.reverse()
    moved.blocks = [driver.free_blocks.pop() for _ in old]
    assert not set(moved.blocks) & set(old)
    ends = zip(slots, moved.blocks, valid, strict=True)
    result = move(runner, [load(10 + n, *each) for n, each in enumerate(ends)])
    assert result.traffic.loaded_bytes == 3 * runner.info.groups[0].block_bytes
    driver.join(moved, 7)
    decode(driver, moved, 12)
    assert moved.output == stayed
    assert len(runner.logits) == len(expected)
    for left, right in zip(runner.logits, expected, strict=True):
        assert left.tobytes() == right.tobytes()


def test_copies_beside_steps_disturb_neither(runner):
    """One sequence goes to the host and to other blocks, over and over, while another decodes."""
    driver = Driver(runner)
    alone = driver.generate(Sequence(prompt(3, 20)), 60)
    alone_mover = driver.generate(Sequence(prompt(4, 50)), 8)
    decoding, mover = Sequence(prompt(3, 20)), Sequence(prompt(4, 50))
    driver.join(decoding, 0)
    driver.join(mover, 1)
    driver.step([(mover, 50), (decoding, 20)])
    driver.leave(mover)
    where, away, ticket, pending, laps = mover.blocks, None, 0, set(), 0
    while len(decoding.output) < 60:
        if not pending and away is None:
            away = [laps % 2 * 6 + number for number in range(len(where))]
            pairs, make = zip(where, away, strict=True), save
        elif not pending:
            driver.free_blocks = where + driver.free_blocks
            where = [driver.free_blocks.pop() for _ in away]
            runner._decoder.cache[where] = float("nan")
            pairs, make = zip(away, where, strict=True), load
            away, laps = None, laps + 1
        else:
            pairs = ()
        copies = [make(ticket + number, *pair) for number, pair in enumerate(pairs)]
        ticket += len(copies)
        pending |= {copy.ticket for copy in copies}
        if copies:
            pending -= set(run_plan(runner, copies).tickets)
        pending -= set(driver.step([(decoding, 1)]).tickets)
    while pending:
        pending -= set(run_plan(runner, wait=True).tickets)
    if away is not None:
        move(
            runner,
            [load(ticket + n, *pair) for n, pair in enumerate(zip(away, where, strict=True))],
        )
    mover.blocks = where
    driver.join(mover, 3)
    decode(driver, mover, 8)
    assert decoding.output == alone
    assert mover.output == alone_mover
    assert laps > 2, "nothing was copied while steps ran"


def test_a_plan_may_ask_again_for_what_has_ended_and_hears_nothing_of_what_has_not(runner):
    move(runner, [save(1, 0, 0), save(2, 1, 1)])
    assert run_plan(runner).tickets == []
    assert run_plan(runner, overdue=[2, 3]).tickets == [2]
    assert run_plan(runner, overdue=[2, 3]).tickets == [2]
    assert run_plan(runner, [Copy(3, 0, 0, 1, 16)], overdue=[1]).tickets == [3, 1]


def test_without_a_host_tier_a_plan_that_names_it_is_an_error(directory):
    runner = Watched(load_decoder(directory, num_blocks=4))
    assert runner.info.host_blocks == 0
    assert run_plan(runner, wait=True, overdue=[5]).tickets == []
    with pytest.raises(ValueError, match="no host tier"):
        run_plan(runner, [save(1, 0, 0)])


def settings(directory, host_bytes):
    options = {"directory": str(directory), "kv_bytes": 1 << 20, "dtype": "float32"}
    return options | {"host_bytes": host_bytes}


@pytest.mark.parametrize(("host_bytes", "blocks"), [(0, 0), (1 << 20, 28)])
def test_settings_say_how_many_blocks_the_host_tier_has(directory, host_bytes, blocks):
    info = load_runner(settings(directory, host_bytes)).info
    assert info.groups[0].block_bytes == 36864
    assert info.host_blocks == blocks


def test_a_host_tier_that_nobody_sized_takes_a_bounded_share_of_memory(directory):
    info = load_runner(settings(directory, None)).info
    assert 0 < info.host_blocks * info.groups[0].block_bytes <= min(2 << 30, free_memory() // 4)


@pytest.mark.parametrize("host_bytes", [1000, -1])
def test_a_host_tier_that_holds_no_block_is_refused(directory, host_bytes):
    with pytest.raises(ValueError, match="holds no block"):
        load_runner(settings(directory, host_bytes))
