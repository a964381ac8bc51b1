"""The queue of waiting turns: shares, credit, locality, and the bound on waiting."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.clock import VirtualClock
from agentserve.engine.fairness import OVERDUE_S, TurnQueue
from agentserve.engine.messages import Submit
from agentserve.engine.sequence import Sequence, Turn


class Rig:
    """A queue in virtual time. It never looks at chains, so sequences have none."""

    def __init__(self):
        self.clock = VirtualClock(start=100.0)
        self.resident = set()
        self.queue = TurnQueue(self.clock, lambda turn: turn.sequence.id in self.resident)
        self._arrivals = 0

    def sequence(self, number):
        return Sequence(number, 1, "n", None)

    def submit(self, sequence, *, background=False):
        self._arrivals += 1
        command = Submit(self._arrivals, sequence.id, 1, 0, b"", "n", 8, [], background=background)
        now, none = self.clock.monotonic(), array("i")
        turn = Turn(command, sequence, self._arrivals, now, 0, none, frozenset(), limit=8)
        sequence.turn = turn
        self.queue.add(turn)
        return turn

    def serve(self, seconds):
        """Admit the head, let it use `seconds`, end it."""
        turn = self.queue.head()
        self.queue.remove(turn)
        self.clock.advance(seconds)
        self.queue.charge(turn.sequence, seconds)
        turn.sequence.turn = None
        return turn


def test_turns_of_equal_sequences_go_in_order_of_arrival():
    rig = Rig()
    turns = [rig.submit(rig.sequence(n)) for n in range(5)]
    assert list(rig.queue) == turns
    assert [rig.serve(1.0) for _ in turns] == turns
    assert rig.queue.head() is None


def test_a_heavy_sequence_does_not_starve_light_ones():
    """One asks for 4 s a turn, four for 0.5 s; all come back at once. Each gets an equal share."""
    rig = Rig()
    heavy, *light = [rig.sequence(n) for n in range(5)]
    for each in (heavy, *light):
        rig.submit(each)
    used = dict.fromkeys((heavy, *light), 0.0)
    for _ in range(300):
        seconds = 4.0 if rig.queue.head().sequence is heavy else 0.5
        served = rig.serve(seconds).sequence
        used[served] += seconds
        rig.submit(served)
    fair = sum(used.values()) / 5
    assert all(abs(each - fair) < 5.0 for each in used.values())


def test_a_sequence_that_was_away_has_saved_up_no_credit():
    rig = Rig()
    away, busy, other = (rig.sequence(n) for n in range(3))
    rig.submit(away)
    rig.serve(1.0)
    for _ in range(20):
        for each in (busy, other):
            rig.submit(each)
        rig.serve(5.0)
        rig.serve(5.0)
    rig.submit(busy)
    rig.submit(away)
    assert away.service == pytest.approx(busy.service, abs=5.0)
    new = rig.sequence(9)
    rig.submit(new)
    assert new.service == pytest.approx(busy.service, abs=5.0)


def test_credit_is_not_saved_up_either_while_nobody_is_active():
    rig = Rig()
    alone = rig.sequence(1)
    for _ in range(10):
        rig.submit(alone)
        rig.serve(10.0)
    new = rig.sequence(2)
    rig.submit(new)
    assert new.service == alone.service == 100.0


def test_a_resident_turn_goes_first_only_within_a_band_of_service():
    rig = Rig()
    first, near, far = (rig.sequence(n) for n in range(3))
    turns = [rig.submit(each) for each in (first, near, far)]
    rig.queue.charge(near, 0.3)
    rig.queue.charge(far, 50.0)
    rig.resident = {near.id, far.id}
    assert list(rig.queue) == [turns[1], turns[0], turns[2]]


def test_overdue_turns_go_first_come_first_served_whatever_they_have_used():
    rig = Rig()
    heavy, other, light = (rig.sequence(n) for n in range(3))
    rig.submit(heavy)
    rig.queue.charge(heavy, 1000.0)
    rig.clock.advance(5.0)
    rig.submit(other)
    rig.clock.advance(OVERDUE_S - 1)
    rig.submit(light)
    assert [t.sequence for t in rig.queue] == [heavy, other, light]
    assert rig.queue.overdue() == 1
    rig.clock.advance(1.0)
    assert rig.queue.overdue() == 2


def test_a_preempted_turn_comes_back_ahead_of_all_that_are_not_overdue():
    rig = Rig()
    old = rig.submit(rig.sequence(1))
    rig.clock.advance(15.0)
    preempted = rig.submit(rig.sequence(2))
    rig.queue.charge(preempted.sequence, 30.0)
    rig.queue.remove(preempted)
    rig.queue.put_back(preempted)
    assert list(rig.queue) == [preempted, old]
    rig.clock.advance(5.0)
    assert list(rig.queue) == [old, preempted]


def test_background_turns_are_last_and_never_overdue():
    rig = Rig()
    idle = rig.submit(rig.sequence(1), background=True)
    rig.clock.advance(10 * OVERDUE_S)
    turn = rig.submit(rig.sequence(2))
    assert list(rig.queue) == [turn, idle]


def test_charges_that_are_not_positive_change_nothing():
    rig = Rig()
    sequence = rig.sequence(1)
    for seconds in (0.0, -3.0, float("nan")):
        rig.queue.charge(sequence, seconds)
    assert sequence.service == 0.0


def test_a_turn_that_is_not_queued_cannot_be_taken_out():
    rig = Rig()
    turn = rig.submit(rig.sequence(1))
    rig.queue.remove(turn)
    assert turn not in rig.queue
    with pytest.raises(KeyError):
        rig.queue.remove(turn)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, 7)),
            st.tuples(st.just("serve"), st.floats(0.0, 12.0)),
            st.tuples(st.just("preempt"), st.floats(0.0, 3.0)),
            st.tuples(st.just("wait"), st.floats(0.0, 15.0)),
        ),
        max_size=80,
    ),
    st.sets(st.integers(0, 7)),
)
def test_nobody_who_came_later_overtakes_an_overdue_turn(events, resident):
    """INV-09, in virtual time: who is admitted came before every turn that waited 20 s."""
    rig = Rig()
    rig.resident = resident
    sequences = [rig.sequence(n) for n in range(8)]
    for what, value in events:
        if what == "submit" and sequences[value].turn is None:
            rig.submit(sequences[value])
        elif what == "wait":
            rig.clock.advance(value)
        elif what in ("serve", "preempt") and len(rig.queue):
            head = rig.queue.head()
            assert next(iter(rig.queue)) is head
            now = rig.clock.monotonic()
            overdue = [t for t in rig.queue if t.submitted_at <= now - OVERDUE_S]
            assert all(head.arrival <= turn.arrival for turn in overdue)
            served = rig.serve(value)
            if what == "preempt":
                served.sequence.turn = served
                rig.queue.put_back(served)
    used = {each.service for each in sequences}
    assert all(value >= 0 for value in used)
