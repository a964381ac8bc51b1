"""Chains, tiers and copies in flight against a model of token lists, on simulated memory."""

import random

import pytest
from counts import COUNTS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from kv_device import KvDevice, tokens_of

from agentserve.kv.blocks import NoRoom
from agentserve.kv.chains import KvCache, KvShape
from agentserve.kv.policy import make_policy

BLOCK = 4
WALKS = 300
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Model:
    """A sequence as it should be."""

    def __init__(self, chain, log, namespace):
        self.chain, self.log, self.namespace = chain, log, namespace


class KvMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        target=sequences,
        blocks=st.integers(3, 12),
        host=st.sampled_from([8, 3, 40, 1, 8, 0]),
        groups=st.sampled_from([1, 1, 2]),
        policy=st.sampled_from(["lru+host"] * 5 + ["tool-aware", "device-lru", "none"]),
        bits=st.sampled_from([None, 4]),
        late=st.booleans(),
    )
    def start(self, blocks, host, groups, policy, bits, late):
        options = {} if bits is None else {"digest": lambda data: bytes([sum(data) % 2**bits])}
        shape = KvShape("m", blocks, BLOCK, host, groups)
        self.kv = KvCache(shape, make_policy(policy), **options)
        self.device = KvDevice(self.kv, late=late)
        self.models: list[Model] = []
        self.asked: dict[int, float] = {}  # when an overdue ticket was last asked for
        opened = [self.open(namespace) for namespace in "aab"]
        for model in opened:
            self.turn(model, [1, 0, 1, 1, 0, 1])
        return multiple(*opened)

    def add(self, chain, log, namespace):
        model = Model(chain, log, namespace)
        self.models.append(model)
        return model

    def acquire(self, model):
        """Admit a turn; what is found must be the KV of the log's first tokens."""
        cached = self.device.admit(model.chain, model.log)
        if isinstance(cached, NoRoom):
            return False
        assert cached == model.chain.length < len(model.log)
        return True

    def write(self, model, count):
        """Compute some tokens of a running turn, once its blocks have arrived."""
        if model.chain.loading:
            return
        length = min(len(model.log), model.chain.length + count)
        assert self.device.read(model.chain) == list(model.log[: model.chain.length])
        if self.device.write(model.chain, model.log, length):
            assert self.device.read(model.chain) == list(model.log[:length])

    def finish(self, model):
        """Run a turn to its end though nobody gives way; only copies may be in the way."""
        for _ in range(200):
            if model.chain.active or self.acquire(model):
                self.write(model, len(model.log))
            if model.chain.length == len(model.log):
                self.stop(model)
                return
            self.device.step()
            self.device.land_all()
        raise AssertionError("INV-06: a turn that fits the pool does not get to run")

    def stop(self, model):
        if model.chain.active:
            self.device.end(model.chain)

    def cut(self, model, keep):
        self.stop(model)
        keep = min(keep, len(model.log))
        self.kv.cut(model.chain, keep)
        del model.log[keep:]

    @rule(target=sequences, namespace=st.sampled_from("ab"))
    def open(self, namespace):
        return self.add(self.kv.open(namespace), tokens_of([]), namespace)

    @rule(model=sequences, new=few_tokens)
    def turn(self, model, new):
        """Run a whole turn, if copies do not hold it up."""
        model.log.extend(new)
        if model.chain.active or self.acquire(model):
            self.write(model, len(model.log))
        self.stop(model)

    @rule(model=sequences, new=few_tokens, count=st.integers(1, 12))
    def append(self, model, new, count):
        model.log.extend(new)
        if model.chain.active or self.acquire(model):
            self.write(model, count)

    @rule(model=sequences, count=st.integers(1, 12), wait=st.booleans(), end=st.booleans())
    def go_on(self, model, count, wait, end):
        """Compute some tokens, perhaps as soon as the chain has arrived, whatever else has not."""
        while wait and model.chain.loading:
            self.device.land(len(self.device.flights) - 1)
        if model.chain.active:
            self.write(model, count)
        if end:
            self.stop(model)

    @rule(target=sequences, model=sequences, last=st.integers(0, 1))
    def full_hit(self, model, last):
        log = model.log[: len(model.log) // BLOCK * BLOCK]
        log.append(last)
        twin = self.add(self.kv.open(model.namespace), log, model.namespace)
        if self.acquire(twin):
            self.write(twin, BLOCK)
        return twin

    @rule(target=sequences, model=sequences)
    def hit_inside_a_block(self, model):
        log = model.log[: len(model.log) // BLOCK * BLOCK]
        twin = self.add(self.kv.open(model.namespace), log, model.namespace)
        if log and self.acquire(twin):
            self.write(twin, BLOCK)
        return twin

    @rule(target=sequences, model=sequences, keep=st.integers(0, 40), send=st.booleans())
    def fork(self, model, keep, send):
        keep = min(keep, len(model.log))
        child = self.kv.fork(model.chain, keep)
        if send:
            self.device.send()
        return self.add(child, model.log[:keep], model.namespace)

    @rule(model=sequences, keep=st.integers(0, 40), again=st.sampled_from(["", "same", "other"]))
    def cut_for_a_rollback(self, model, keep, again):
        old = model.log[:]
        self.cut(model, keep)
        if again:
            model.log.extend(old[len(model.log) :] if again == "same" else old[:1])

    @rule(model=sequences, back=st.integers(1, 3))
    def cut_at_a_stop_string(self, model, back):
        self.cut(model, max(0, len(model.log) - back))

    @rule(model=sequences, new=few_tokens)
    def cut_of_a_cancelled_turn(self, model, new):
        before = len(model.log)
        model.log.extend(new)
        if model.chain.active or self.acquire(model):
            self.write(model, len(new) // 2)
        self.cut(model, before)

    @rule(model=sequences, count=st.integers(1, 12))
    def fail_a_step(self, model, count):
        if not model.chain.active or model.chain.loading:
            return
        length = min(len(model.log), model.chain.length + count)
        self.device.write(model.chain, model.log, length, garbage=True)
        self.kv.discard(model.chain)

    @rule(marks=st.lists(st.integers(2, 9), min_size=1, max_size=40))
    def evict(self, marks):
        visitor = self.add(self.kv.open("visitor"), tokens_of(marks), "visitor")
        if self.acquire(visitor):
            self.write(visitor, len(marks))
        self.close(visitor)

    @rule(ended=st.lists(st.integers(0, 99), max_size=6))
    def step(self, ended):
        """Begin copies that nobody waits for, and end some that are in flight."""
        self.device.step()
        for number in ended[: len(self.device.flights)]:
            copy = self.device.land(number % len(self.device.flights))
            COUNTS[f"state-machine copies, {copy.kind}"] += 1

    @rule(last_first=st.booleans())
    def settle(self, last_first):
        self.device.land_all(last_first=last_first)
        self.device.settle()

    @rule(
        model=sequences,
        kv=st.sampled_from(["host", "auto", "device", "drop"]),
        settle=st.booleans(),
    )
    def hint(self, model, kv, settle):
        model.chain.idle.kv = kv
        self.kv.residency.hint(model.chain)
        if settle:
            self.device.settle()

    @rule(model=sequences, begin=st.sampled_from([True, True, False]), queued=st.integers(0, 3))
    def announce(self, model, begin, queued):
        self.kv.residency.promote(model.chain, begin=begin)
        if not model.chain.active:
            model.chain.idle.queued = queued

    @rule(number=st.integers(0, 99))
    def lose_a_host_copy(self, number):
        self.kv.residency.drop_host(lambda chains: chains[number % len(chains)])

    @rule(ticket=st.integers(-1, 3), seconds=st.sampled_from([1.0, 29.0, 30.0]))
    def trouble(self, ticket, seconds):
        """Hear of a copy that is unknown or over, and wait long for those in flight."""
        flights = self.device.flights
        if ticket not in {flight.copy.ticket for flight in flights}:
            stale = self.kv.copies.stale
            self.kv.copies.settle([ticket])
            assert self.kv.copies.stale == stale + 1
        self.device.now = now = self.device.now + seconds
        asked = [(f.copy.ticket, self.asked.get(f.copy.ticket, f.sent_at)) for f in flights]
        late = self.kv.copies.overdue(now)
        assert sorted(late) == sorted(ticket for ticket, at in asked if now - at >= 30.0)
        self.asked.update(dict.fromkeys(late, now))

    @rule(model=consumes(sequences))
    def close(self, model):
        self.kv.close(model.chain)
        self.models.remove(model)

    @invariant()
    def holds(self):
        COUNTS["state-machine steps"] += 1
        self.device.poison()
        self.kv.check()
        for model in self.models:
            self.kv.check_tokens(model.chain, model.log)
            self.device.check_resident(model.chain, model.log)
            if model.chain.active and not model.chain.loading:
                assert self.device.read(model.chain) == list(model.log[: model.chain.length])

    def teardown(self):
        for model in self.models:
            self.stop(model)
        for model in self.models:
            if model.log and self.kv.blocks_for(len(model.log)) <= self.kv.num_blocks:
                self.finish(model)
                self.holds()
        self.device.step()
        for model in self.models:
            self.kv.close(model.chain)
        self.kv.check()
        self.device.land_all()
        self.kv.check()
        for pool in (*self.kv.pools, *self.kv.host_pools):
            assert pool.locked == 0
            assert pool.tokens == (pool.total - pool.free) * BLOCK, "a tail outlives its sequence"
        assert not self.kv.copies


KvMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestKvMachine = KvMachine.TestCase


class Walk:
    """Rules of a KvMachine in random order: more even, and faster, than what hypothesis draws."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.machine = KvMachine()
        pick = self.rng.choice
        self.machine.start(
            blocks=self.rng.randint(3, 12),
            host=pick([1, 2, 3, 5, 8, 40]),
            groups=pick([1, 1, 2]),
            policy=pick(["lru+host"] * 6 + ["tool-aware", "device-lru", "none"]),
            bits=pick([None, None, 4]),
            late=pick([False, True]),
        )

    def some(self, low=1, high=9):
        return [self.rng.randint(0, 1) for _ in range(self.rng.randint(low, high))]

    def step(self):
        """Apply one rule."""
        rng, machine = self.rng, self.machine
        if not machine.models or (len(machine.models) < 4 and rng.random() < 0.1):
            return machine.open(rng.choice("aab"))
        model = rng.choice(machine.models)
        crowded = len(machine.models) > 8
        rules = {
            lambda: machine.turn(model, self.some()): 4,
            lambda: machine.append(model, self.some(), rng.randint(1, 12)): 5,
            lambda: machine.go_on(
                model, rng.randint(1, 12), rng.random() < 0.5, rng.random() < 0.5
            ): 5,
            lambda: machine.full_hit(model, rng.randint(0, 1)): 1,
            lambda: machine.hit_inside_a_block(model): 1,
            lambda: machine.fork(model, rng.randint(0, 40), rng.random() < 0.5): 0
            if crowded
            else 4,
            lambda: machine.cut_for_a_rollback(
                model, rng.randint(0, 30), rng.choice(["", "same", "other"])
            ): 3,
            lambda: machine.cut_at_a_stop_string(model, rng.randint(1, 3)): 2,
            lambda: machine.cut_of_a_cancelled_turn(model, self.some()): 1,
            lambda: machine.fail_a_step(model, rng.randint(1, 12)): 1,
            lambda: machine.evict([rng.randint(2, 9) for _ in range(rng.randint(1, 40))]): 2,
            lambda: machine.step([rng.randint(0, 99) for _ in range(rng.randint(0, 6))]): 10,
            lambda: machine.settle(rng.random() < 0.5): 1,
            lambda: machine.hint(
                model, rng.choice(["host", "host", "auto", "device", "drop"]), rng.random() < 0.5
            ): 5,
            lambda: machine.announce(model, rng.random() < 0.8, rng.choice([0, 0, 1, 2])): 3,
            lambda: machine.lose_a_host_copy(rng.randint(0, 99)): 1,
            lambda: machine.trouble(rng.randint(-1, 30), rng.choice([1.0, 30.0])): 1,
            lambda: machine.close(model): 6 if crowded else 1,
        }
        return rng.choices(list(rules), list(rules.values()))[0]()

    def run(self, steps):
        """Apply some rules, then end everything."""
        for _ in range(steps):
            self.step()
            self.machine.holds()
        self.machine.teardown()


@pytest.mark.parametrize("first", range(0, WALKS, 30))
def test_random_walks(first):
    for seed in range(first, first + 30):
        try:
            Walk(seed).run(60)
        except Exception as error:
            raise AssertionError(f"Walk({seed}).run(60): {error!r}") from error
