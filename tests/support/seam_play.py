"""Drives an engine link in tests."""

import asyncio
from typing import Any

import msgspec

from agentserve.engine.messages import (
    Command,
    Down,
    Event,
    Finished,
    Ready,
    Refused,
    Stats,
    Submit,
    Tokens,
)
from agentserve.engine.plan import pack

STOP = 1


def submit(turn: int, sequence: int, tokens: list[int], **more: Any) -> Submit:
    """Return a submit that opens the sequence, unless `keep` is given."""
    fields: dict[str, Any] = {
        "generation": 1,
        "keep": 0,
        "namespace": "local",
        "max_tokens": 6,
        "stop_ids": [STOP],
    }
    return Submit(turn=turn, sequence=sequence, tokens=pack(tokens), **(fields | more))


async def ready(link: Any) -> Ready:
    """Receive up to the next Ready."""
    return await until(link, lambda event: isinstance(event, Ready))


async def down(link: Any) -> Down:
    """Receive up to the next Down."""
    return await until(link, lambda event: isinstance(event, Down))


async def until(link: Any, wanted: Any) -> Any:
    """Receive until an event is `wanted` and return that one."""
    async with asyncio.timeout(60):
        while True:
            for event in await link.receive():
                if wanted(event):
                    return event


async def play(link: Any, commands: list[Command]) -> list[Event]:
    """Send one command after the other, each when the one before was answered in full.

    Returns every event but Stats, without the times that differ from run to run.
    """
    events: list[Event] = []
    for command in commands:
        link.send(command)
        if not isinstance(command, Submit):
            continue
        turn = command.turn

        def ends(event: Event, turn: int = turn) -> bool:
            if not isinstance(event, Stats):
                events.append(event)
            return isinstance(event, Finished | Refused) and event.turn == turn

        await until(link, ends)
    return [_timeless(event) for event in events]


async def tokens_of(link: Any, command: Submit) -> list[int]:
    """Run one turn and return the tokens that it generated."""
    events = await play(link, [command])
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


def _timeless(event: Event) -> Event:
    times = {name: 0.0 for name in ("queue_s", "prefill_s", "decode_s") if hasattr(event, name)}
    return msgspec.structs.replace(event, **times) if times else event
