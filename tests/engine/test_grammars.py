"""Which turns wait for which grammar: decisions on a virtual clock."""

import pytest
from engine_driver import VOCAB, Driver

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.grammars import REMEMBER_S, START_S, Grammars, NotCompiled
from agentserve.engine.messages import Close, Submit
from agentserve.engine.plan import pack
from agentserve.engine.simworld import EvenTokens, ToyCompiler, ToyGrammar

PROMPT = list(range(20))


class Slow(ToyCompiler):
    """Is done when it is told to."""

    up = True
    done = False

    @property
    def ready(self):
        return self.up

    def poll(self):
        return super().poll() if self.done else []


def driver(**settings) -> Driver:
    limits = EngineSettings(check_invariants=True, **settings)
    return Driver(compiler=Slow(VOCAB), settings=limits)


def test_a_turn_waits_for_its_grammar_and_others_run():
    d = driver()
    waiting = d.submit(1, PROMPT, grammar="even")
    other = d.submit(2, PROMPT)
    d.drain()
    assert d.finished.keys() == {other}
    assert d.engine.stats().compiling == 1
    d.engine.grammars._compiler.done = True
    d.drain()
    assert d.finished[waiting].reason == "length"
    assert d.started[waiting].queue_s > 0.01
    assert d.engine.stats().compiling == 0


def test_a_grammar_is_compiled_once_for_all_that_wait_and_then_kept():
    d = driver()
    turns = [d.submit(n, PROMPT, grammar="even") for n in (1, 2, 3)]
    d.engine.grammars._compiler.done = True
    d.drain()
    d.run(4, PROMPT, grammar="even")
    assert d.finished.keys() >= set(turns)
    assert d.engine.grammars._compiler.begun == {"even": 1}


def test_a_compiler_over_its_time_is_ended_and_only_its_turns_are_refused():
    d = driver(grammar_s=2.0)
    slow = [d.submit(n, PROMPT, grammar="even/slow") for n in (1, 2)]
    next_one = d.submit(3, PROMPT, grammar="even")
    d.step()
    d.step(1.9)
    assert not d.refused
    d.step(0.2)
    assert [d.refused[turn].code for turn in slow] == ["bad_grammar"] * 2
    assert "2 s" in d.refused[slow[0]].message
    d.engine.grammars._compiler.done = True
    d.drain()
    assert d.finished[next_one].reason == "length"
    assert d.engine.stats().compilers_ended == 1


def test_the_time_counts_from_when_the_compiler_is_up_and_its_start_has_a_limit_too():
    d = driver(grammar_s=2.0)
    d.engine.grammars._compiler.up = False
    turn = d.submit(1, PROMPT, grammar="even")
    d.step(START_S - 1)
    assert not d.refused
    d.step(2.0)
    assert d.refused[turn].code == "no_compiler"


def test_a_grammar_that_failed_is_not_tried_again_for_a_while():
    d = driver()
    d.engine.grammars._compiler.done = True
    for number, seconds in ((1, 0.01), (2, 0.01), (3, REMEMBER_S)):
        d.step(seconds)
        turn = d.run(number, PROMPT, grammar="bad")
        assert d.refused[turn].code == "bad_grammar"
    assert d.engine.grammars._compiler.begun == {"bad": 2}


def test_a_cancelled_turn_ends_at_once_and_has_changed_nothing():
    d = driver()
    first = d.run(1, PROMPT, max_tokens=2)
    log = PROMPT + d.output[first]
    waiting = d.submit(1, [7], keep=5, grammar="even")
    busy = d.submit(1, [7], keep=5)
    d.cancel(waiting)
    d.drain()
    assert d.refused[busy].code == "busy"
    end = d.finished[waiting]
    assert (end.reason, end.log_length, end.kv_length) == ("cancelled", 5, 5)
    again = d.run(1, [7], keep=len(log))
    assert d.started[again].cached == len(log) - 1


def test_closing_a_sequence_ends_the_turn_that_waits():
    d = driver()
    waiting = d.submit(1, PROMPT, grammar="even")
    d.engine.apply(Close(1))
    d.drain()
    assert (d.finished[waiting].reason, d.finished[waiting].log_length) == ("cancelled", 0)
    assert not d.engine.grammars.holds(1)


def test_waiting_for_a_grammar_counts_as_waiting():
    d = driver(max_waiting=2)
    turns = [d.submit(n, PROMPT, grammar=f"even/{n}") for n in (1, 2, 3)]
    d.step()
    assert d.refused.keys() == {turns[2]}
    assert d.refused[turns[2]].code == "overloaded"


def test_namespaces_take_turns_at_the_compiler():
    clock, compiler = VirtualClock(), Slow(VOCAB)
    compiler.done = True
    grammars = Grammars(compiler, EngineSettings(), clock)
    for number in range(1, 7):
        submit_to(grammars, number, f"even/{number}", "crowd")
    submit_to(grammars, 7, "even/lone", "lone")
    order = []
    while len(grammars):
        clock.advance(1.0)
        order += [held.command.turn for held in grammars.advance()]
    assert order.index(7) <= 2
    assert sorted(order) == list(range(1, 8))


def test_the_cache_is_bounded_by_bytes_and_drops_what_was_used_longest_ago():
    grammars = Grammars(Slow(VOCAB), EngineSettings(grammar_cache_bytes=100), VirtualClock())
    for name in "abc":
        grammars.keep(name, ToyGrammar(VOCAB, None, 40))
        assert grammars.find("a" if name == "b" else name) is not None
        grammars.check()
    assert grammars.cache_bytes == 80
    assert grammars.find("b") is None
    grammars.keep("huge", ToyGrammar(VOCAB, None, 101))
    assert grammars.find("huge") is None
    assert grammars.cache_bytes == 80


def test_without_a_compiler_there_are_no_grammars():
    with pytest.raises(NotCompiled, match="no grammars"):
        Grammars(None, EngineSettings(), VirtualClock()).find("even")


def submit_to(grammars, number, spec, namespace):
    command = Submit(number, number, 1, 0, pack([1]), namespace, 1, [], grammar=spec)
    assert grammars.find(spec) is None
    grammars.hold(command)


@pytest.mark.parametrize(("keep", "said", "left"), [(True, 0, 5), (True, 3, 2), (False, 4, 1)])
def test_a_grammar_begins_before_what_was_said_of_its_message(keep, said, left):
    d = driver()
    d.engine.grammars._compiler.done = True
    log = PROMPT + d.output[d.run(1, PROMPT, max_tokens=2)]
    where = {"tokens": log[-1:], "keep": len(log) - 1} if keep else {"tokens": log}
    turn = d.run(1, **where, grammar="breaks:5", said=said, max_tokens=9)
    assert (d.finished[turn].reason, len(d.output[turn])) == ("error", left)


@pytest.mark.parametrize(("said", "anew", "left"), [(3, True, 3), (3, False, 0), (2, True, 1)])
def test_a_grammar_that_what_was_said_does_not_fit_may_begin_after_it(said, anew, left):
    d = driver()
    d.engine.grammars._compiler.done = True
    log = PROMPT + d.output[d.run(1, PROMPT, max_tokens=2)]
    turn = d.run(1, [], keep=len(log), grammar="breaks:3", said=said, anew=anew, max_tokens=9)
    assert (d.finished[turn].reason, len(d.output[turn])) == ("error", left)


def test_a_grammar_that_breaks_on_what_was_said_changes_nothing(monkeypatch):
    def broken(self, token):
        raise RuntimeError("no")

    monkeypatch.setattr(EvenTokens, "accept", broken)
    d = driver()
    d.engine.grammars._compiler.done = True
    log = PROMPT + d.output[d.run(1, PROMPT, max_tokens=2)]
    for said, code in ((9, "bad_grammar"), (len(log) + 1, "invalid"), (-1, "invalid")):
        turn = d.submit(1, [], keep=len(log), grammar="even", said=said)
        d.drain()
        assert d.refused[turn].code == code
    assert d.started[d.run(1, [], keep=len(log))].cached == len(log) - 1
