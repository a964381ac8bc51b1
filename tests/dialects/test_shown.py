"""What clients of the dialects are shown of a turn, however much of it can still be told."""

import pytest

from agentserve import wire
from agentserve.dialects.shown import Closed, Ended, More, Opened, gather, steps

PROBABLE = wire.TokenLogprob(7, "Yes", [89], -0.5)
OUTPUT = [
    wire.ReasoningOut("i_1", "Hm."),
    wire.TextOut("i_2", "Yes.", [PROBABLE]),
    wire.ToolCallOut("i_3", "call_1", "ls", {"path": "."}),
    wire.MalformedToolCallOut("i_4", "call_2", "<broken", "not JSON"),
]
TURN = wire.Turn("t_1", "s", None, "completed", wire.Context(0, 10, 10), output=OUTPUT)


def told(item, index):
    yield wire.ItemStarted(index, item)
    if isinstance(item, wire.TextOut):
        yield wire.TextDelta(index, item.text[:2], item.logprobs)
        yield wire.TextDelta(index, item.text[2:])
    elif isinstance(item, wire.ReasoningOut):
        yield wire.ReasoningDelta(index, item.text)
    yield wire.ItemDone(index, item)


async def numbered(events):
    for number, event in enumerate(events):
        yield number, event


@pytest.mark.parametrize("beginning", [True, False])
async def test_a_turn_of_which_only_the_end_is_told_is_shown_whole(beginning):
    events = [one for index, item in enumerate(OUTPUT) for one in told(item, index)]
    events = [*(events if beginning else []), wire.TurnDone(TURN)]
    shown = [step async for step in steps(numbered(events))]
    (ended,) = [step for step in shown if isinstance(step, Ended)]
    assert [(part.kind, part.text, part.logprobs) for part in ended.parts] == [
        ("reasoning", "Hm.", []),
        ("text", "Yes.", [PROBABLE]),
        ("call", '{"path":"."}', []),
        ("text", "<broken", []),
    ]
    said = [
        "".join(m.delta for m in shown if isinstance(m, More) and m.part is p) for p in ended.parts
    ]
    assert said == [part.text for part in ended.parts]
    for kind in (Opened, Closed):
        assert [step.part for step in shown if isinstance(step, kind)] == ended.parts
    assert (await gather(steps(numbered(events)))).parts == ended.parts
