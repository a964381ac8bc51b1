"""A driven engine whose device holds two small sequences, and whose host tier holds all."""

from engine_driver import Driver

PROMPT = list(range(20))  # with 4 tokens of output: 23 tokens of KV in 6 blocks of 4


def with_host(**options):
    """Two sequences of PROMPT fit the device, all fit the host tier."""
    return Driver(**{"num_blocks": 12, "block_size": 4, "host_blocks": 64, **options})


def offloaded(sequence=1, **options):
    """A driver whose sequence has had one turn and is in the host tier only; and its log."""
    d = with_host(**options)
    log = PROMPT + d.output[d.run(sequence, PROMPT)]
    d.offload(sequence)
    assert d.where(sequence) == (0, 23)
    return d, log
