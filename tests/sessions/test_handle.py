import asyncio

import pytest

from agentserve import wire
from agentserve.clock import VirtualClock
from agentserve.sessions.handle import FellBehind, TurnHandle, finished_handle

CONTEXT = wire.Context(0, 10, 10)
TURN = wire.Turn("t_1", "s", None, "completed", CONTEXT)


def handle(**bounds):
    return TurnHandle("t_1", VirtualClock(), **bounds)


async def read(source, after=0):
    return [(number, event) async for number, event in source.events(after)]


async def test_events_are_numbered_from_one_and_end_with_the_terminal_event():
    one = handle()
    reader = asyncio.create_task(read(one))
    await asyncio.sleep(0)
    one.publish(wire.TextDelta(0, "a"))
    await asyncio.sleep(0)
    one.publish(wire.TextDelta(0, "b"))
    one.end(TURN, wire.TurnDone(TURN))
    events = await reader
    assert [number for number, _ in events] == [1, 2, 3]
    assert [type(event) for _, event in events] == [wire.TextDelta, wire.TextDelta, wire.TurnDone]
    assert await one.result() is TURN


async def test_a_stream_resumes_after_a_sequence_number_and_always_says_how_it_ended():
    one = handle()
    for letter in "abcd":
        one.publish(wire.TextDelta(0, letter))
    one.end(TURN, wire.TurnDone(TURN))
    whole = await read(one)
    for after in range(6):
        assert await read(one, after) == (whole[after:] or whole[-1:])


async def test_a_reader_that_fell_behind_is_told_where_to_go_on_and_the_turn_goes_on():
    one = handle(max_bytes=2000)
    slow = one.events()
    one.publish(wire.TextDelta(0, "first"))
    assert (await anext(slow))[0] == 1
    for _ in range(100):
        one.publish(wire.TextDelta(0, "x" * 50))
    assert one.buffered <= 2000
    with pytest.raises(FellBehind) as told:
        await anext(slow)
    assert told.value.code == "overloaded"
    oldest = told.value.details["oldest_event"]
    assert (await anext(one.events(oldest - 1)))[0] == oldest
    one.end(TURN, wire.TurnDone(TURN))
    assert (await read(one, 100))[-1][1] == wire.TurnDone(TURN)


async def test_who_begins_after_a_long_turn_has_ended_is_told_its_end():
    one = handle(max_bytes=2000)
    for _ in range(100):
        one.publish(wire.TextDelta(0, "x" * 50))
    one.end(TURN, wire.TurnDone(TURN))
    assert await read(one) == [(101, wire.TurnDone(TURN))]
    with pytest.raises(FellBehind):
        await read(one, after=1)


async def test_several_readers_see_the_same_events():
    one = handle()
    readers = [asyncio.create_task(read(one)) for _ in range(5)]
    for letter in "abc":
        await asyncio.sleep(0)
        one.publish(wire.TextDelta(0, letter))
    one.end(TURN, wire.TurnDone(TURN))
    seen = await asyncio.gather(*readers)
    assert all(events == seen[0] for events in seen)


async def test_the_handle_of_a_turn_that_ended_holds_its_terminal_event():
    assert [event for _, event in await read(finished_handle(TURN, VirtualClock()))] == [
        wire.TurnDone(TURN)
    ]


def test_the_grace_period_starts_when_the_last_reader_goes():
    clock = VirtualClock()
    one = TurnHandle("t_1", clock)
    one.attach()
    one.attach()
    one.detach()
    assert one.left_at is None
    clock.advance(3)
    one.detach()
    assert one.left_at == 3
    one.attach()
    assert one.left_at is None


def told(count):
    return [wire.TokenLogprob(place, "a", [97], -1.0) for place in range(count)]


@pytest.mark.parametrize("count", [1, 10])
async def test_log_probabilities_stay_with_an_ended_turn_as_long_as_its_deltas_do(count):
    one = handle(max_bytes=3000)
    one.attach()
    logprobs = told(count)
    for place in range(count):
        one.publish(wire.TextDelta(0, "a", logprobs[place : place + 1]))
    item = wire.TextOut("i_1", "a" * count, logprobs)
    one.publish(wire.ItemDone(0, item))
    turn = wire.Turn("t_1", "s", None, "completed", CONTEXT, output=[item])
    one.end(turn, wire.TurnDone(turn))
    one.lighten()  # another turn begins
    assert await one.result() is turn  # whoever waited has them
    one.detach()
    fits = count == 1
    buffered = [event async for _, event in one.events(after=count)]
    outputs = [(await one.result()).output[0], buffered[0].item, buffered[1].turn.output[0]]
    assert [bool(output.logprobs) for output in outputs] == [fits] * 3
    assert {output.text for output in outputs} == {item.text}
