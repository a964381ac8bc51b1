"""Pool, index and chains against a model of token lists, on simulated device memory."""

from counts import COUNTS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)
from kv_device import KvDevice, tokens_of

from agentserve.kv.blocks import NoRoom
from agentserve.kv.chains import KvCache, KvShape

BLOCK = 4
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Model:
    """A sequence as it should be."""

    def __init__(self, chain, log, namespace):
        self.chain, self.log, self.namespace = chain, log, namespace


class KvMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(blocks=st.integers(3, 12), bits=st.sampled_from([None, 4]))
    def start(self, blocks, bits):
        options = {} if bits is None else {"digest": lambda data: bytes([sum(data) % 2**bits])}
        self.kv = KvCache(KvShape("m", blocks, BLOCK), **options)
        self.device = KvDevice(self.kv)
        self.models: list[Model] = []

    def add(self, chain, log, namespace):
        model = Model(chain, log, namespace)
        self.models.append(model)
        return model

    def acquire(self, model):
        """Admit a turn; what is found must be the KV of the log's first tokens."""
        cached = self.kv.acquire(model.chain, model.log)
        if isinstance(cached, NoRoom):
            return False
        self.device.copy()
        assert cached == model.chain.length < len(model.log)
        assert self.device.read(model.chain) == list(model.log[:cached])
        return True

    def write(self, model, count):
        length = min(len(model.log), model.chain.length + count)
        if self.device.write(model.chain, model.log, length):
            assert self.device.read(model.chain) == list(model.log[:length])
        self.device.copy()

    def stop(self, model):
        if model.chain.active:
            self.kv.release(model.chain)

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
        self.device.copy()
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
        if not model.chain.active:
            return
        length = min(len(model.log), model.chain.length + count)
        self.device.write(model.chain, model.log, length, garbage=True)
        self.device.copy()
        self.kv.discard(model.chain)

    @rule(marks=st.lists(st.integers(2, 9), min_size=1, max_size=40))
    def evict(self, marks):
        visitor = self.add(self.kv.open("visitor"), tokens_of(marks), "visitor")
        if self.acquire(visitor):
            self.write(visitor, len(marks))
        self.close(visitor)

    @rule(model=consumes(sequences))
    def close(self, model):
        self.kv.close(model.chain)
        self.models.remove(model)

    @invariant()
    def holds(self):
        COUNTS["state-machine steps"] += 1
        self.kv.check()
        for model in self.models:
            self.kv.check_tokens(model.chain, model.log)
            self.device.check_resident(model.chain, model.log)

    def teardown(self):
        for model in self.models:
            self.kv.close(model.chain)
        self.kv.check()
        assert self.kv.pools[0].locked == 0
        assert not self.kv.copies


KvMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestKvMachine = KvMachine.TestCase
