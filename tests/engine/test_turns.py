"""What one turn does: counts, ends, refusals, forced tokens, grammars, faults."""

import msgspec
import pytest
from engine_driver import VOCAB, Driver, RecordingRunner, alone

from agentserve.config import EngineSettings
from agentserve.engine.messages import NOTHING_FITS, Cancel, Close, Fork, Progress, Stats, Submit
from agentserve.engine.plan import SamplingParams, pack, unpack
from agentserve.engine.simworld import EvenTokens, ToyCompiler

PROMPT = list(range(20))


def test_a_turn_gives_the_tokens_that_the_oracle_gives():
    d = Driver()
    turn = d.run(1, PROMPT, max_tokens=40)
    assert d.output[turn] == alone(PROMPT, 40)


def test_a_next_turn_computes_only_what_is_new():
    d = Driver()
    first = d.run(1, PROMPT, max_tokens=6)
    log = PROMPT + d.output[first]
    second = d.run(1, [7, 8, 9], keep=len(log), max_tokens=3)
    # The last token of the first turn was logged but not computed: it leads the next prefill.
    assert d.finished[first].kv_length == len(log) - 1
    assert (d.started[second].cached, d.started[second].computed) == (len(log) - 1, 4)
    assert d.output[second] == alone([*log, 7, 8, 9], 3)


def test_a_sampled_stop_token_ends_the_turn_and_is_not_logged():
    d = Driver()
    expected = alone(PROMPT, 30)
    stop = next(t for n, t in enumerate(expected) if t not in expected[:n] and n > 3)
    turn = d.run(1, PROMPT, max_tokens=30, stop_ids=[stop])
    end = d.finished[turn]
    kept = expected[: expected.index(stop)]
    assert d.output[turn] == kept
    assert (end.reason, end.stop_id) == ("stop", stop)
    assert end.log_length == end.kv_length == len(PROMPT) + len(kept)


def test_prefill_only_computes_the_whole_prompt():
    d = Driver()
    turn = d.run(1, PROMPT, max_tokens=0)
    end = d.finished[turn]
    assert (end.reason, end.log_length, end.kv_length) == ("prefilled", 20, 20)
    assert d.output[turn] == []
    after = d.run(1, [5], keep=20)
    assert d.started[after].computed == 1


def test_a_turn_without_new_tokens_goes_on_from_the_log():
    d = Driver()
    d.run(1, PROMPT, max_tokens=0)
    turn = d.run(1, [], keep=20, max_tokens=3)
    assert d.started[turn].computed == 1
    assert d.output[turn] == alone(PROMPT, 3)


def test_forced_tokens_replace_sampled_ones_and_then_sampling_goes_on():
    d = Driver()
    turn = d.run(1, PROMPT, max_tokens=6, force=[250, 251, 252])
    assert d.output[turn] == [250, 251, 252, *alone([*PROMPT, 250, 251, 252], 3)]


def test_a_forced_stop_token_ends_the_turn():
    d = Driver()
    turn = d.run(1, PROMPT, max_tokens=6, force=[250, 3], stop_ids=[3])
    assert d.output[turn] == [250]
    assert (d.finished[turn].reason, d.finished[turn].stop_id) == ("stop", 3)


def test_a_full_context_ends_the_turn():
    d = Driver(max_context=24)
    turn = d.run(1, PROMPT, max_tokens=100)
    assert (d.finished[turn].reason, d.finished[turn].log_length) == ("context", 24)


def test_a_full_pool_ends_the_turn():
    d = Driver(num_blocks=3, block_size=8)
    turn = d.run(1, PROMPT, max_tokens=100)
    assert d.finished[turn].reason == "context"
    assert d.output[turn] == alone(PROMPT, 5)


def test_a_cancelled_turn_keeps_its_tokens_in_the_log():
    d = Driver()
    turn = d.submit(1, PROMPT, max_tokens=100)
    for _ in range(5):
        d.step()
    d.engine.apply(Cancel(turn))
    d.drain()
    end = d.finished[turn]
    assert end.reason == "cancelled"
    assert end.log_length == len(PROMPT) + 5
    after = d.run(1, [9], keep=22, max_tokens=2)
    assert d.started[after].cached == 22
    assert d.output[after] == alone([*PROMPT, *d.output[turn][:2], 9], 2)


def test_a_waiting_turn_can_be_cancelled():
    d = Driver(max_slots=1)
    running, waiting = d.submit(1, PROMPT), d.submit(2, PROMPT)
    d.step()
    d.engine.apply(Cancel(waiting))
    d.drain()
    assert d.finished[waiting].reason == "cancelled"
    assert waiting not in d.started
    assert d.finished[running].reason == "length"


def test_closing_a_sequence_cancels_its_turn_and_forgets_it():
    d = Driver()
    turn = d.submit(1, PROMPT, max_tokens=100)
    d.step()
    d.engine.apply(Close(1))
    d.drain()
    assert d.finished[turn].reason == "cancelled"
    later = d.run(1, [1], keep=5)
    assert d.refused[later].code == "unknown_sequence"
    assert d.engine.stats().blocks_locked == 0


def test_a_fork_goes_its_own_way():
    d = Driver()
    first = d.run(1, PROMPT, max_tokens=5)
    log = PROMPT + d.output[first]
    d.engine.apply(Fork(1, 1, 2, 1, 22))
    one = d.submit(1, [1], keep=len(log))
    two = d.submit(2, [2], keep=22)
    d.drain()
    assert d.output[one] == alone([*log, 1], 4)
    assert d.output[two] == alone([*log[:22], 2], 4)
    assert d.started[two].cached == 22


def test_a_fork_of_a_running_sequence_takes_what_it_has():
    d = Driver()
    first = d.submit(1, PROMPT, max_tokens=10)
    for _ in range(4):
        d.step()
    d.engine.apply(Fork(1, 1, 2, 1, 23))
    d.drain()
    second = d.run(2, [2], keep=23)
    assert d.output[first] == alone(PROMPT, 10)
    assert d.output[second] == alone([*PROMPT, *d.output[first][:3], 2], 4)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": pack([VOCAB])}, "invalid"),
        ({"tokens": pack([-1])}, "invalid"),
        ({"tokens": b"abc"}, "invalid"),
        ({"tokens": b"", "keep": 0}, "invalid"),
        ({"force": pack([VOCAB])}, "invalid"),
        ({"keep": -1}, "invalid"),
        ({"max_tokens": -1}, "invalid"),
        ({"keep": 25}, "unknown_sequence"),
        ({"generation": 2}, "unknown_sequence"),
        ({"namespace": "b"}, "unknown_sequence"),
        ({"sequence": 9}, "unknown_sequence"),
        ({"tokens": pack([1] * 76)}, "context_full"),
        ({"tokens": pack([1] * 44)}, "exceeds_kv_capacity"),
        ({"grammar": "nonsense"}, "bad_grammar"),
    ],
)
def test_a_refused_submit_says_why_and_changes_nothing(change, code):
    d = Driver(num_blocks=8, block_size=8, max_context=96, compiler=ToyCompiler(VOCAB))
    first = d.run(1, PROMPT)
    log = PROMPT + d.output[first]
    good = Submit(900, 1, 1, 20, pack([1]), "a", 4, [])
    d.engine.apply(msgspec.structs.replace(good, **change))
    d.drain()
    assert d.refused[900].code == code
    assert d.refused[900].message
    after = d.run(1, [1], keep=len(log))
    assert d.output[after] == alone([*log, 1], 4)


def test_a_prompt_that_just_fits_runs():
    d = Driver(num_blocks=8, block_size=8, max_context=96)
    turn = d.run(1, [1] * 63)
    assert d.output[turn] == alone([1] * 63, 1 + 1)
    assert d.finished[turn].reason == "context"


def test_a_second_turn_of_a_running_sequence_is_busy():
    d = Driver()
    d.submit(1, PROMPT, max_tokens=50)
    d.step()
    second = d.submit(1, [1], keep=3)
    into = Fork(1, 1, 1, 1, 0)
    d.engine.apply(into)
    d.drain()
    assert d.refused[second].code == "busy"
    assert d.refused[-1].code == "invalid"


def test_more_waiting_turns_than_allowed_are_refused_as_overloaded():
    d = Driver(max_slots=1, settings=EngineSettings(max_waiting=2, check_invariants=True))
    turns = [d.submit(1, PROMPT)]
    d.step()
    turns += [d.submit(n, PROMPT) for n in range(2, 6)]
    d.drain()
    assert [d.refused[t].code for t in turns[3:]] == ["overloaded"] * 2
    assert all(d.output[t] == alone(PROMPT, 4) for t in turns[:3])


def test_an_open_turn_number_is_not_taken_twice():
    d = Driver()
    d.submit(1, PROMPT, max_tokens=50)
    d.engine.apply(Submit(1, 2, 1, 0, pack([1]), "a", 4, []))
    d.drain()
    assert d.refused[1].code == "invalid"
    assert d.finished[1].reason == "length"


def test_a_grammar_masks_what_is_sampled():
    d = Driver(compiler=ToyCompiler(VOCAB))
    turn = d.run(1, PROMPT, max_tokens=30, grammar="even")
    assert len(d.output[turn]) == 30
    assert all(token % 2 == 0 for token in d.output[turn])


def test_a_grammar_that_breaks_ends_its_own_turn_only():
    d = Driver(compiler=ToyCompiler(VOCAB))
    broken = d.submit(1, PROMPT, max_tokens=30, grammar="breaks:3")
    other = d.submit(2, PROMPT, max_tokens=30)
    d.drain()
    assert d.finished[broken].reason == "error"
    assert "breaks here" in d.finished[broken].message
    assert len(d.output[broken]) == 3
    assert d.output[other] == alone(PROMPT, 30)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_no_token_fits_ends_its_own_turn_only(monkeypatch, depth):
    monkeypatch.setattr(EvenTokens, "mask", lambda self: bytes(VOCAB // 8 + 8))
    d = Driver(compiler=ToyCompiler(VOCAB), **({"depth": depth} if depth else {}))
    stuck = d.submit(1, PROMPT, max_tokens=30, grammar="even")
    other = d.submit(2, PROMPT, max_tokens=30)
    d.drain()
    assert (d.finished[stuck].reason, d.finished[stuck].message) == ("error", NOTHING_FITS)
    assert stuck not in d.output or d.output[stuck] == []
    assert d.output[other] == alone(PROMPT, 30)


def test_a_grammar_without_a_compiler_is_refused():
    d = Driver()
    turn = d.run(1, PROMPT, grammar="even")
    assert d.refused[turn].code == "bad_grammar"


class NotFinite(RecordingRunner):
    """The row of slot 0 fails from the third step on."""

    def collect(self, handle):
        result = super().collect(handle)
        finite = [row.slot != 0 or handle.plan.step < 3 for row in handle.plan.rows]
        for row, good in zip(handle.plan.rows, finite, strict=True):
            if not good:
                self.write(row.slot, row.start, [-7] * row.count)
        return msgspec.structs.replace(result, finite=finite)


def test_a_row_that_is_not_finite_fails_alone_and_its_kv_is_not_used_again():
    d = Driver(runner=NotFinite, block_size=4)
    bad = d.submit(1, PROMPT, max_tokens=30)
    good = d.submit(2, PROMPT[:7], max_tokens=30)
    d.drain()
    assert d.finished[bad].reason == "error"
    assert "finite" in d.finished[bad].message
    assert d.output[good] == alone(PROMPT[:7], 30)
    assert d.engine.stats().blocks_locked == 0
    assert d.finished[bad].kv_length == 0


def test_prefill_in_chunks_reports_progress():
    d = Driver(settings=EngineSettings(token_budget=8, check_invariants=True))
    turn = d.run(1, PROMPT, max_tokens=1)
    done = [(e.done, e.total) for e in d.events if isinstance(e, Progress)]
    assert done == [(8, 20), (16, 20), (20, 20)]
    assert d.output[turn] == alone(PROMPT, 1)


def test_every_batch_of_events_ends_with_stats():
    d = Driver()
    d.submit(1, PROMPT)
    while d.engine.busy:
        events = d.step()
        assert isinstance(events[-1], Stats)
    assert d.engine.step() == []
    stats = d.engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (20, 3)
    assert (stats.running, stats.waiting, stats.blocks_locked) == (0, 0, 0)
    assert stats.tokens_in_kv == 23


def test_times_are_those_of_the_clock():
    d = Driver(max_slots=1)
    d.submit(1, PROMPT, max_tokens=5)
    second = d.run(2, PROMPT, max_tokens=11)
    assert d.started[second].queue_s == pytest.approx(0.06)
    assert d.finished[second].decode_s == pytest.approx(0.10)


def test_a_runner_gets_the_tokens_before_the_first_row_only_if_sampling_looks_back():
    d = Driver()
    first = d.run(1, PROMPT, max_tokens=2)
    log = PROMPT + d.output[first]
    d.run(1, [1], keep=22, sampling=SamplingParams(repetition_penalty=1.1))
    plain, looks_back = (p.added[0] for p in d.runner.plans if p.added)
    assert plain.history == b""
    assert list(unpack(looks_back.history)) == log[:21]
    assert looks_back.prompt_length == 23
