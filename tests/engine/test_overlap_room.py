"""Depth 1: room, faults and grammars under a step in flight; a crowd of turns."""

import random

import pytest
from engine_driver import VOCAB, Driver, RecordingRunner, alone
from overlap import OUTPUT, PROMPT, ahead, assert_nothing_is_left, ends, rows_of

from agentserve.config import EngineSettings
from agentserve.engine.grammars import Answer
from agentserve.engine.messages import Fork
from agentserve.engine.simworld import ToyCompiler

# Room


def test_a_preempted_turn_gives_the_same_tokens():
    d = ahead(num_blocks=12)
    old = d.submit(1, list(range(20)), max_tokens=26)
    young = d.submit(2, list(range(60, 76)), max_tokens=26)
    d.drain()
    assert d.finished[old].preemptions == 0
    assert d.finished[young].preemptions > 0
    assert d.output[old] == alone(range(20), 26)
    assert d.output[young] == alone(range(60, 76), 26)
    assert d.engine.stats().discarded_tokens == 0
    assert_nothing_is_left(d)


def test_nobody_is_preempted_for_room_that_the_step_in_flight_makes():
    # The pool is full when the second turn ends, in the step before it would need a fifth block.
    prompt = list(range(60, 73))
    stop = alone(prompt, 4)[-1]
    for depth in (0, 1):
        d = ahead(num_blocks=10, depth=depth)
        first = d.submit(1, PROMPT, max_tokens=12)
        second = d.submit(2, prompt, max_tokens=9, stop_ids=[stop])
        d.finish(second)
        assert d.engine.stats().blocks_free == 0
        d.drain()
        assert d.finished[second].reason == "stop"
        assert d.output[first] == OUTPUT[:12]
        stats = d.engine.stats()
        assert (stats.preemptions, stats.discarded_tokens) == (0, 0)


def test_a_background_prefill_is_paused_after_its_row_in_flight():
    d = ahead(settings=EngineSettings(token_budget=16, check_invariants=True), max_slots=1)
    turn = d.submit(1, PROMPT, max_tokens=0, background=True)
    d.step()
    d.step()
    other = d.submit(2, [5] * 9, max_tokens=3)
    d.drain()
    assert d.output[other] == alone([5] * 9, 3)
    assert (d.finished[turn].reason, d.finished[turn].kv_length) == ("prefilled", 20)
    assert rows_of(d) == 20 + 9 + 2
    assert d.engine.stats().discarded_tokens == 0


def test_a_background_prefill_ends_without_room_also_under_a_late_row():
    d = ahead(num_blocks=8)
    d.run(1, list(range(100, 112)), max_tokens=0)
    d.run(3, list(range(200, 216)), max_tokens=0)
    stop = alone([*range(100, 112), 7], 1)
    first = d.submit(1, [7], keep=12, max_tokens=9, stop_ids=stop)  # takes the last block
    second = d.submit(2, PROMPT, max_tokens=0, background=True)
    d.finish(first)
    d.drain()
    assert (d.finished[second].reason, d.finished[second].kv_length) == ("prefilled", 0)


# Faults, grammars, sampling


class Spoiled(RecordingRunner):
    """The row of slot 0 in step `bad` is not finite, and its KV is garbage."""

    bad = 4

    def launch(self, plan):
        step = super().launch(plan)
        step.finite = [row.slot != 0 or plan.step != self.bad for row in plan.rows]
        for row, good in zip(plan.rows, step.finite, strict=True):
            if not good:
                self.write(row.slot, row.start, [-7] * row.count)
        return step


def test_a_row_that_is_not_finite_ends_its_turn_and_the_row_behind_it_is_ignored():
    d = ahead(runner=Spoiled)
    bad = d.submit(1, PROMPT, max_tokens=30)
    good = d.submit(2, PROMPT[:7], max_tokens=30)
    d.drain()
    assert d.finished[bad].reason == "error"
    assert d.output[bad] == OUTPUT[:3]
    assert d.finished[bad].kv_length == 0
    assert d.output[good] == alone(PROMPT[:7], 30)
    assert d.engine.stats().discarded_tokens == 1
    assert_nothing_is_left(d)
    again = d.run(1, PROMPT, max_tokens=9)
    assert d.output[again] == OUTPUT[:9]


@pytest.mark.parametrize(("bad", "end"), [(9, ("prefilled", 4)), (2, ("error", 0))])
def test_a_background_prefill_that_lost_its_room_ends_once_its_row_in_flight_is_known(bad, end):
    settings = EngineSettings(token_budget=16, check_invariants=True)
    d = ahead(runner=Spoiled, num_blocks=8, settings=settings)
    d.runner.bad = bad
    d.run(1, [1, 2, 3], max_tokens=0)
    turn = d.submit(2, PROMPT, max_tokens=0, background=True)
    d.step()
    for number in range(10, 16):  # each takes a block for its copy of the tail
        d.engine.apply(Fork(1, 1, number, 1, 3))
    assert d.engine.stats().blocks_free == 0
    d.drain()
    assert (d.finished[turn].reason, d.finished[turn].kv_length) == end
    assert_nothing_is_left(d)


class Ladder:
    """Allows one token only: as many as it has accepted."""

    broken = False

    def __init__(self):
        self._accepted = 0

    def prepare(self):
        pass

    def mask(self):
        words = [0] * (VOCAB // 32)
        words[self._accepted // 32] = 1 << self._accepted % 32
        return b"".join(word.to_bytes(4, "little") for word in words)

    def accept(self, token):
        assert token == self._accepted
        self._accepted += 1


class Ladders(ToyCompiler):
    """Every spec is a ladder."""

    size = 1
    matcher = Ladder

    def _answer(self, job, kind, spec):
        return Answer(job, self)


def test_a_grammar_has_accepted_each_token_before_the_mask_of_the_next():
    d = ahead(compiler=Ladders(VOCAB))
    turns = [d.submit(n, PROMPT[n:], max_tokens=30, grammar="ladder") for n in (1, 2)]
    d.drain()
    assert [d.output[turn] for turn in turns] == [list(range(30))] * 2


def test_a_grammar_that_breaks_ends_its_own_turn_only():
    d = ahead(compiler=ToyCompiler(VOCAB))
    broken = d.submit(1, PROMPT, max_tokens=30, grammar="breaks:3")
    other = d.submit(2, PROMPT, max_tokens=30)
    d.drain()
    assert (d.finished[broken].reason, len(d.output[broken])) == ("error", 3)
    assert d.output[other] == OUTPUT[:30]
    assert_nothing_is_left(d)


# Everything at once


def crowd(depth: int, **options) -> Driver:
    """Many turns that begin, end, fork, wait in the host tier and come back, from one seed."""
    rng = random.Random(1)
    d = ahead(
        depth=depth,
        max_slots=6,
        compiler=ToyCompiler(VOCAB),
        settings=EngineSettings(token_budget=24, check_invariants=True),
        **options,
    )
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    logs: dict[int, list[int]] = {}
    for _ in range(4):
        wanted = {}
        for number in range(1, 13):
            log = logs.setdefault(number, [])
            new = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            tokens = new if log else shared[: rng.randint(1, 30)] + new
            turn = d.submit(
                number,
                tokens,
                keep=len(log),
                max_tokens=rng.randint(1, 20),
                stop_ids=[rng.randrange(VOCAB) for _ in range(20)],
                force=[rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 3)))],
                grammar=rng.choice((None, None, "even")),
            )
            wanted[turn] = number, [*log, *tokens]
        d.drain()
        for turn, (number, log) in wanted.items():
            logs[number] = log + d.output[turn]
            assert len(logs[number]) == d.finished[turn].log_length
    return d


@pytest.mark.parametrize(
    "room", [{"num_blocks": 512}, {"num_blocks": 60}, {"num_blocks": 60, "host_blocks": 300}]
)
def test_a_crowd_gets_at_depth_1_what_it_gets_at_depth_0(room):
    now, late = crowd(0, **room), crowd(1, **room)
    assert ends(now) == ends(late)
    assert now.engine.stats().discarded_tokens == 0 < late.engine.stats().discarded_tokens
    assert_nothing_is_left(late)


class Slow(RecordingRunner):
    """Its steps take 10 ms, which pass when the host waits for them."""

    def collect(self, handle):
        self.clock.advance(0.01)
        return super().collect(handle)


def test_the_time_of_a_step_is_counted_once():
    d = ahead(runner=Slow)
    d.runner.clock = d.clock
    d.submit(1, PROMPT, max_tokens=40)
    d.submit(2, PROMPT[3:], max_tokens=40)
    begun = d.clock.monotonic()
    d.drain()
    sequences = d.engine._sequences.values()
    passed = d.clock.monotonic() - begun
    assert 0.5 * passed < sum(sequence.service for sequence in sequences) <= passed + 1e-9
