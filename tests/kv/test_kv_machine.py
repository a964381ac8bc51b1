"""Chains, tiers and copies in flight against a model of token lists, on simulated memory."""

from counts import COUNTS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from kv_device import KvDevice, tokens_of

from agentserve.kv.blocks import NoRoom
from agentserve.kv.chains import KvCache, KvShape
from agentserve.kv.policy import make_policy

BLOCK = 4
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Model:
    """A sequence as it should be."""

    def __init__(self, chain, log, namespace):
        self.chain, self.log, self.namespace = chain, log, namespace


class KvMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        blocks=st.integers(3, 12),
        host=st.sampled_from([0, 1, 3, 8, 40]),
        groups=st.sampled_from([1, 1, 2]),
        policy=st.sampled_from(["lru+host", "tool-aware", "lru+host", "device-lru", "none"]),
        bits=st.sampled_from([None, 4]),
        late=st.booleans(),
    )
    def start(self, blocks, host, groups, policy, bits, late):
        options = {} if bits is None else {"digest": lambda data: bytes([sum(data) % 2**bits])}
        shape = KvShape("m", blocks, BLOCK, host, groups)
        self.kv = KvCache(shape, make_policy(policy), **options)
        self.device = KvDevice(self.kv, late=late)
        self.models: list[Model] = []
        self.overdue_at: dict[int, float] = {}

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

    @rule(model=sequences, new=few_tokens, count=st.integers(1, 12))
    def append(self, model, new, count):
        model.log.extend(new)
        if model.chain.active or self.acquire(model):
            self.write(model, count)

    @rule(model=sequences, count=st.integers(1, 12))
    def go_on(self, model, count):
        if model.chain.active:
            self.write(model, count)

    @rule(model=sequences)
    def end_turn(self, model):
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

    @rule(target=sequences, model=sequences, keep=st.integers(0, 40))
    def fork(self, model, keep):
        keep = min(keep, len(model.log))
        child = self.kv.fork(model.chain, keep)
        self.device.send()
        return self.add(child, model.log[:keep], model.namespace)

    @rule(model=sequences, keep=st.integers(0, 40))
    def cut_for_a_rollback(self, model, keep):
        self.cut(model, keep)

    @rule(model=sequences, back=st.integers(1, 3))
    def cut_at_a_stop_string(self, model, back):
        self.cut(model, max(0, len(model.log) - back))

    @rule(model=sequences, keep=st.integers(0, 40), again=st.booleans())
    def cut_for_a_rewind(self, model, keep, again):
        old = model.log[:]
        self.cut(model, keep)
        model.log.extend(old[len(model.log) :] if again else old[:1])

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

    @rule()
    def step(self):
        self.device.step()

    @precondition(lambda self: self.device.flights)
    @rule(number=st.integers(0, 99))
    def land(self, number):
        self.device.land(number % len(self.device.flights))

    @precondition(lambda self: self.device.flights)
    @rule(last_first=st.booleans())
    def land_all(self, last_first):
        self.device.land_all(last_first=last_first)

    @rule(last_first=st.booleans())
    def settle(self, last_first):
        self.device.land_all(last_first=last_first)
        self.device.settle()

    @rule(ticket=st.integers(-1, 3) | st.just(10**6))
    def stray_ticket(self, ticket):
        if ticket in {flight.copy.ticket for flight in self.device.flights}:
            return
        stale = self.kv.copies.stale
        self.kv.copies.settle([ticket])
        assert self.kv.copies.stale == stale + 1

    @rule(seconds=st.sampled_from([1.0, 29.0, 30.0]))
    def pass_time(self, seconds):
        self.device.now += seconds
        now, flights = self.device.now, self.device.flights
        asked = self.overdue_at
        due = [f for f in flights if now - asked.get(f.copy.ticket, f.sent_at) >= 30.0]
        late = self.kv.copies.overdue(now)
        assert sorted(late) == sorted(flight.copy.ticket for flight in due)
        asked.update(dict.fromkeys(late, now))

    @rule(model=sequences, begin=st.sampled_from([True, True, False]))
    def promote(self, model, begin):
        self.kv.residency.promote(model.chain, begin=begin)

    @rule(model=sequences, kv=st.sampled_from(["auto", "device", "host", "host", "drop"]))
    def hint(self, model, kv):
        model.chain.idle.kv = kv
        self.kv.residency.hint(model.chain)

    @rule(model=sequences, place=st.integers(0, 3))
    def queue(self, model, place):
        if not model.chain.active:
            model.chain.idle.queued = place

    @rule(number=st.integers(0, 99))
    def lose_a_host_copy(self, number):
        self.kv.residency.drop_host(lambda chains: chains[number % len(chains)])

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
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestKvMachine = KvMachine.TestCase
