"""Sessions that want the same engine: light ones first, and no wait without a bound."""

import random
import statistics

import pytest
from engine_driver import Driver, RecordingRunner

from agentserve.config import EngineSettings
from agentserve.engine.messages import Close, Fork


class Slow(RecordingRunner):
    """Each step takes 10 ms and 2.5 ms a token."""

    clock = None

    def launch(self, plan):
        self.clock.advance(0.010 + 0.0025 * sum(row.count for row in plan.rows))
        return super().launch(plan)


def play(prompts, until, comes_back):
    """Let each session come back with so many new tokens as soon as it has an answer.

    One turn runs at a time; `comes_back` says how the next is sent.
    Returns (session, submitted, started, finished) of every turn.
    """
    rng = random.Random(1)
    settings = EngineSettings(token_budget=512)
    d = Driver(num_blocks=800, max_slots=1, max_context=8192, runner=Slow, settings=settings)
    d.runner.clock = d.clock
    open_turns, times = {}, []
    sequences = list(range(len(prompts)))
    while d.clock.monotonic() < until:
        for session, count in enumerate(prompts):
            if session not in [s for s, _ in open_turns.values()]:
                new = rng.choices(range(256), k=count)
                sequence = sequences[session]
                if comes_back == "fork" and sequence in d.engine._sequences:
                    sequences[session] += len(prompts)
                    d.engine.apply(Fork(sequence, 1, sequences[session], 1, 1))
                    d.engine.apply(Close(sequence))
                    sequence = sequences[session]
                known = sequence in d.engine._sequences and comes_back != "anew"
                turn = d.submit(sequence, new, keep=int(known), max_tokens=2)
                open_turns[turn] = session, d.clock.monotonic()
        d.step(0.0)
        for turn in [turn for turn in open_turns if turn in d.finished]:
            session, came = open_turns.pop(turn)
            times.append((session, came, came + d.started[turn].queue_s, d.clock.monotonic()))
    return times


@pytest.mark.parametrize("comes_back", ["longer", "anew", "fork"])
def test_a_heavy_session_gives_way_to_light_ones_for_20_seconds_at_most(comes_back):
    times = play([3000] + [100] * 8, 200, comes_back)
    waits = [[start - came for s, came, start, _ in times if s == session] for session in range(9)]
    for _, came, start, _ in times:
        overtook = [s for _, c, s, _ in times if c > came and s < start]
        assert not overtook or max(overtook) - came <= 20
    longest = max(end - start for _, _, start, end in times)
    assert longest > 7
    heavy, *light = waits
    assert max(heavy) <= 20 + longest
    assert statistics.median(heavy[1:]) > 15
    assert max(statistics.median(each) for each in light) < 5
    assert max(max(each) for each in light) <= 20 + longest
    counts = [len(each) for each in light]
    assert max(counts) - min(counts) <= 2
