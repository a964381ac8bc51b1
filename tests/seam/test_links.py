"""Both forms of the engine seam, on the hash oracle."""

import asyncio

import pytest
from seam_factories import OPTIONS, ORACLE
from seam_play import down, play, ready, submit, tokens_of, until

from agentserve.clock import VirtualClock
from agentserve.config import EngineSettings
from agentserve.engine.messages import (
    Cancel,
    Close,
    Finished,
    Fork,
    Ready,
    Refused,
    Stats,
    Tokens,
)
from agentserve.engine.process import ProcessLink
from agentserve.engine.thread import ThreadLink
from agentserve.errors import EngineDown

SETTINGS = EngineSettings(check_invariants=True)
SCRIPT = [
    submit(1, 7, list(range(2, 40))),
    submit(2, 7, [41, 42], keep=30),
    Fork(sequence=7, generation=1, into=8, into_generation=3, keep=20),
    submit(3, 8, [50, 51, 52], generation=3, keep=20),
    submit(4, 9, [1, 2], keep=5),  # nobody knows sequence 9
    submit(5, 10, list(range(600)), max_tokens=1),  # over the context
    submit(6, 11, [5, 6, 7], max_tokens=0),
    Cancel(turn=99),
    Close(sequence=7),
    submit(7, 7, [43], keep=2),
]


@pytest.fixture(params=[ThreadLink, ProcessLink], ids=["thread", "process"])
def form(request):
    return request.param


@pytest.fixture
async def open_link():
    links = []

    def start(form, factory=ORACLE, clock=None, **options):
        link = form(factory, OPTIONS | options, SETTINGS, clock)
        links.append(link)
        return link

    yield start
    for link in links:
        await link.close()


async def test_both_forms_give_the_same_events_for_the_same_commands(open_link):
    streams = []
    for form in (ThreadLink, ProcessLink):
        link = open_link(form)
        first = await ready(link)
        assert first.incarnation == 1
        streams.append([first, *await play(link, SCRIPT)])
    thread, process = streams
    assert thread == process
    refused = [event.code for event in thread if isinstance(event, Refused)]
    assert refused == ["unknown_sequence", "context_full", "unknown_sequence"]
    finished = [event.turn for event in thread if isinstance(event, Finished)]
    assert finished == [1, 2, 3, 6]


async def test_a_step_in_flight_changes_no_event(open_link):
    streams = []
    for depth in (0, 1):
        link = open_link(ThreadLink, depth=depth)
        assert (await ready(link)).info.depth == depth
        streams.append(await play(link, SCRIPT))
    assert streams[0] == streams[1]


async def test_an_idle_engine_sends_its_heartbeat(form, open_link):
    link = open_link(form)
    await ready(link)
    for _ in range(2):
        async with asyncio.timeout(30):
            batch = await link.receive()
        assert [type(event) for event in batch] == [Stats]
        assert link.last_event_age() < 30


async def test_every_batch_of_a_step_ends_with_its_one_stats(form, open_link):
    link = open_link(form)
    await ready(link)
    link.send(submit(1, 1, [2, 3, 4]))
    batches = []
    async with asyncio.timeout(60):
        while not batches or not any(isinstance(event, Finished) for event in batches[-1]):
            batches.append(await link.receive())
    for batch in batches:
        assert [isinstance(event, Stats) for event in batch] == [False] * (len(batch) - 1) + [True]


async def test_the_age_of_the_last_event_grows_while_nobody_reads(form, open_link):
    clock = VirtualClock()
    link = open_link(form, clock=clock)
    await ready(link)
    assert link.last_event_age() == 0.0
    clock.advance(7.5)
    assert link.last_event_age() == 7.5


async def test_a_fast_engine_leaves_its_readers_process_time_to_cancel(form, open_link):
    link = open_link(form, num_blocks=4096, max_context=16_000, vocab_size=8)
    await ready(link)
    begun = asyncio.Event()

    async def read() -> Finished:
        def ends(event):
            if isinstance(event, Tokens):
                begun.set()
            return isinstance(event, Finished)

        return await until(link, ends)

    async def cancel() -> None:
        await begun.wait()
        for _ in range(20):  # as many rounds of the loop as a request takes
            await asyncio.sleep(0.001)
        link.send(Cancel(turn=1))

    link.send(submit(1, 1, [2, 3, 4], max_tokens=4000, stop_ids=[]))
    ended, _ = await asyncio.gather(read(), cancel())
    assert ended.reason == "cancelled"


async def test_commands_sent_before_ready_are_dropped(form, open_link):
    link = open_link(form)
    link.send(submit(1, 1, [2, 3, 4]))
    await ready(link)
    (refused,) = await play(link, [submit(2, 1, [5], keep=3)])
    assert (refused.turn, refused.code) == (2, "unknown_sequence")


async def test_a_step_that_raises_is_a_death_and_the_next_engine_takes_the_tokens_again(
    form, open_link
):
    clock = VirtualClock()
    twin = open_link(form)
    await ready(twin)
    prompt = [2, 3, 4, 5, 6]
    expected = await tokens_of(twin, submit(1, 1, prompt))

    link = open_link(form, "seam_factories:poisoned", clock, poison=77)
    await ready(link)
    link.send(submit(1, 1, [2, 77]))
    death = await down(link)
    assert death.reason == "RuntimeError: the device fell off the bus"
    link.send(submit(2, 1, prompt))  # dropped: nobody is there
    clock.advance(10)
    again = await ready(link)
    assert again.incarnation == 2
    (refused,) = await play(link, [submit(3, 1, [9], keep=5)])
    assert refused.code == "unknown_sequence"
    assert await tokens_of(link, submit(4, 1, prompt)) == expected


async def test_an_engine_that_cannot_be_built_is_tried_three_times_and_then_given_up(
    form, open_link, tmp_path
):
    clock = VirtualClock()
    count = tmp_path / "count"
    link = open_link(form, "seam_factories:broken", clock, failures=99, count=str(count))
    reasons = []
    for _ in range(3):
        assert link.failure is None
        reasons.append((await down(link)).reason)
        clock.advance(10)
    assert reasons[:2] == ["MemoryError: the weights do not fit"] * 2
    assert reasons[2] == link.failure
    assert link.failure == "the engine failed to start 3 times: MemoryError: the weights do not fit"
    waiting = asyncio.create_task(link.receive())
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await link.close()
    with pytest.raises(EngineDown):
        await waiting
    assert count.read_bytes() == b"..."


async def test_a_start_that_fails_twice_still_gives_a_first_incarnation(form, open_link, tmp_path):
    clock = VirtualClock()
    options = {"failures": 2, "count": str(tmp_path / "count")}
    link = open_link(form, "seam_factories:broken", clock, **options)
    for _ in range(2):
        await down(link)
        clock.advance(10)
    assert (await ready(link)).incarnation == 1
    assert link.failure is None


async def test_a_factory_that_does_not_exist_is_a_readable_reason(form, open_link):
    link = open_link(form, "agentserve.engine.oracle:no_such_function")
    assert "no_such_function" in (await down(link)).reason


async def test_restarts_come_at_once_first_and_then_with_longer_pauses(form, open_link):
    clock = VirtualClock()
    link = open_link(form, "seam_factories:poisoned", clock, poison=77)
    for pause in (0.1, 0.4, 1.6, 5.0, 5.0):
        await ready(link)
        link.send(submit(1, 1, [77]))
        await down(link)
        assert link.restart_in() == pytest.approx(pause)
        clock.advance(pause)
    await ready(link)
    clock.advance(60)
    link.send(submit(1, 1, [77]))
    await down(link)
    assert link.restart_in() == pytest.approx(0.1)


async def test_a_cancelled_receive_loses_nothing(form, open_link):
    link = open_link(form)
    await ready(link)
    link.send(submit(1, 1, [2, 3, 4], max_tokens=40, stop_ids=[]))
    got = []
    async with asyncio.timeout(60):
        while not any(isinstance(event, Finished) for event in got):
            receiving = asyncio.ensure_future(link.receive())
            await asyncio.wait([receiving], timeout=0.001)
            if not receiving.done():
                receiving.cancel()
            try:
                got += await receiving
            except asyncio.CancelledError:
                continue
    assert sum(len(event.tokens) for event in got if isinstance(event, Tokens)) == 40


async def test_after_close_receive_says_so_and_send_does_nothing(form, open_link):
    link = open_link(form)
    await ready(link)
    receiving = asyncio.create_task(until(link, lambda event: False))
    await asyncio.sleep(0)
    await link.close()
    link.send(submit(1, 1, [2]))
    for task in (receiving, link.receive()):
        with pytest.raises(EngineDown):
            await task


async def test_a_link_that_never_started_can_be_closed(form, open_link):
    link = open_link(form)
    await link.close()
    with pytest.raises(EngineDown):
        await link.receive()


async def test_ready_tells_what_the_runner_can_do(form, open_link):
    link = open_link(form)
    event = await ready(link)
    assert isinstance(event, Ready)
    assert link.info == event.info
    assert (event.info.block_size, event.info.num_blocks) == (4, 256)
