"""KV that is allocated and holds nothing, measured while sixteen agents are served."""

import random
import statistics

from engine_driver import Driver

from agentserve.config import EngineSettings

BLOCK = 32  # the CPU backend's
SESSIONS, TURNS, SHARED, NEW, OUTPUT = 16, 10, 1250, 175, 32


def test_under_four_percent_of_the_kv_of_sixteen_sessions_is_unused():
    rng = random.Random(0)
    d = Driver(
        num_blocks=2400,
        block_size=BLOCK,
        max_context=8192,
        max_slots=SESSIONS,
        settings=EngineSettings(),
    )
    prompt = [rng.randrange(256) for _ in range(SHARED)]
    logs = {number: list(prompt) for number in range(SESSIONS)}
    unused = []
    for turn in range(TURNS):
        opened = {}
        for number, log in logs.items():
            fed = [rng.randrange(256) for _ in range(rng.randint(NEW - 60, NEW + 60))]
            keep = len(log) if turn else 0
            opened[d.submit(number, log[keep:] + fed, keep=keep, max_tokens=OUTPUT)] = number
            log += fed
        while not set(opened) <= set(d.finished):
            d.step()
            stats = d.engine.stats()
            allocated = (stats.blocks_total - stats.blocks_free) * BLOCK
            unused.append(1 - stats.tokens_in_kv / allocated)
        for id_, number in opened.items():
            logs[number] += d.output[id_]
    # The worst is the first turn, when the prompt is held once for all and the tails are not.
    assert 0 < statistics.mean(unused) < 0.04, f"{statistics.mean(unused):.1%} is unused"
    assert max(unused) < 0.07, f"{max(unused):.1%} was unused"
