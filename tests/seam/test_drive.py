"""The mailboxes on both sides of the engine, and the loop between them."""

import threading

import pytest
from seam_factories import OPTIONS, ORACLE
from seam_play import submit

from agentserve.clock import SystemClock
from agentserve.config import EngineSettings
from agentserve.engine.drive import EngineSpec, Inbox, Outbox, ReaderStalled, describe, run_engine
from agentserve.engine.messages import Cancel, Down, Finished, Ready, Stats, Tokens

STATS = Stats(*[0] * 12)


def test_a_batch_that_nobody_reads_is_kept_and_one_too_many_stops_the_engine():
    outbox = Outbox(lambda: None, max_batches=2)
    batches = [[Tokens(1, [n])] for n in range(2)]
    for batch in batches:
        outbox.put(batch)
    with pytest.raises(ReaderStalled):
        outbox.put([Tokens(1, [9])])
    outbox.put_last([Down("stalled")])
    taken = [outbox.take() for _ in range(4)]
    assert taken == [*batches, [Down("stalled")], None]


def test_a_heartbeat_is_left_out_while_something_waits_to_be_read():
    outbox = Outbox(lambda: None, max_batches=1)
    outbox.put([STATS])
    outbox.put([STATS])
    assert outbox.take() == [STATS]
    assert outbox.take() is None


def test_each_batch_notifies_the_reader_once():
    told = []
    outbox = Outbox(lambda: told.append(1))
    outbox.put([Tokens(1, [2])])
    outbox.put([STATS])
    outbox.put([Tokens(1, [3])])
    assert len(told) == 2


def test_an_inbox_gives_commands_in_order_and_none_once_it_is_closed():
    inbox = Inbox()
    assert inbox.take(0) == []
    inbox.put([Cancel(1), Cancel(2)])
    inbox.put([Cancel(3)])
    assert inbox.take(60) == [Cancel(1), Cancel(2), Cancel(3)]
    inbox.close()
    assert inbox.take(60) is None


@pytest.mark.parametrize("wake", [lambda inbox: inbox.put([Cancel(1)]), Inbox.close])
def test_a_sleeping_engine_is_woken_by_a_command_and_by_close(wake):
    inbox = Inbox()
    got = []
    sleeper = threading.Thread(target=lambda: got.append(inbox.take(300)))
    sleeper.start()
    wake(inbox)
    sleeper.join(60)
    assert got in ([[Cancel(1)]], [None])


def test_an_engine_runs_until_its_inbox_is_closed():
    inbox = Inbox()
    told = threading.Semaphore(0)
    outbox = Outbox(told.release)
    spec = EngineSpec(ORACLE, OPTIONS, EngineSettings(), incarnation=4)
    ended = []
    engine = threading.Thread(
        target=lambda: ended.append(run_engine(spec, inbox, outbox, SystemClock()))
    )
    engine.start()
    inbox.put([submit(1, 1, [2, 3])])
    events = []
    while not any(isinstance(event, Finished) for event in events):
        assert told.acquire(timeout=60)
        events += outbox.take() or []
    inbox.close()
    engine.join(60)
    assert ended == [True]
    assert isinstance(events[0], Ready)
    assert events[0].incarnation == 4


def test_an_engine_whose_events_nobody_reads_dies_instead_of_waiting():
    outbox = Outbox(lambda: None, max_batches=3)
    inbox = Inbox()
    inbox.put([submit(1, 1, [2, 3], max_tokens=50, stop_ids=[])])
    spec = EngineSpec(ORACLE, OPTIONS, EngineSettings())
    assert run_engine(spec, inbox, outbox, SystemClock()) is False
    *_, last = iter(outbox.take, None)
    assert last == [Down("ReaderStalled: 3 event batches were not read")]


def test_a_factory_that_exits_is_a_death_like_any_other():
    outbox = Outbox(lambda: None)
    spec = EngineSpec("sys:exit", {}, EngineSettings())
    assert run_engine(spec, Inbox(), outbox, SystemClock()) is False
    assert outbox.take() == [Down("SystemExit: {}")]


@pytest.mark.parametrize(("factory", "traceback"), [(ORACLE, False), ("sys:exit", True)])
def test_unusable_settings_are_logged_in_one_line_and_what_is_unforeseen_whole(
    factory, traceback, caplog
):
    options = {"block_size": "many"} if factory == ORACLE else {}
    spec = EngineSpec(factory, options, EngineSettings())
    assert run_engine(spec, Inbox(), Outbox(lambda: None), SystemClock()) is False
    (record,) = caplog.records
    assert bool(record.exc_info) is traceback


def test_a_reason_is_one_bounded_line():
    assert describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert describe(KeyError()) == "KeyError"
    assert len(describe(ValueError("x" * 10_000))) < 600
