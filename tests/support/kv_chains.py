"""Chains in the states that residency distinguishes, for tests of kv with two tiers."""

from kv_device import KvDevice, tokens_of

from agentserve.kv.lookup import resident_tokens


class CheckedDevice(KvDevice):
    """Verifies every invariant, and spoils what is free, whenever a copy begins or ends."""

    def send(self):
        copies = super().send()
        self.kv.check()
        return copies

    def land(self, number=0):
        copy = super().land(number)
        self.poison()
        self.kv.check()
        return copy


def on_device(chain) -> int:
    """Return how many of its tokens are on the device."""
    return resident_tokens(chain, "device", 4)


def in_host(chain) -> int:
    """Return how many of its tokens have a host copy."""
    return resident_tokens(chain, "host", 4)


def idle(d, first, count, *, saved=False):
    """Return a chain with `count` tokens, from `first` on, and its log, after its first turn."""
    chain, log = d.kv.open("a"), tokens_of(range(first, first + count))
    d.turn(chain, log)
    if saved:
        d.settle()
    return chain, log


def demoted(d, first, count):
    """Return a chain that is in the host only, and its log."""
    chain, log = idle(d, first, count, saved=True)
    hint(d, chain, "host")
    d.settle()
    chain.idle.kv = "auto"
    assert (on_device(chain), in_host(chain)) == (0, count)
    return chain, log


def hint(d, chain, kv):
    """Give the client's hint where the chain belongs."""
    chain.idle.kv = kv
    d.kv.residency.hint(chain)


def more(log, count):
    """Append `count` tokens that no other log has there."""
    log.extend(range(1000, 1000 + count))
    return log


def kinds(copies) -> list[str]:
    """Return the kind of each copy."""
    return [copy.kind for copy in copies]
