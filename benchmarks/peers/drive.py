"""The closed loop that every system is driven by: turn, tool, turn, in all sessions at once."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from peers.system import Served, System, SystemFailed
from peers.workload import TokenTurn

from agentserve.replay.report import percentile

Sleep = Callable[[float], Awaitable[Any]]


class TurnTimes(msgspec.Struct, frozen=True):
    """One turn as the agent saw it; seconds from its request."""

    session: int
    index: int  # from 0
    ttft_s: float
    turn_s: float
    served: Served


class Played(msgspec.Struct, frozen=True):
    """A finished run."""

    makespan_s: float
    turns: list[TurnTimes]

    def figures(self) -> dict[str, float]:
        """Return the run in numbers; cached_share is of the prompts' tokens, where it is told."""
        ttft = [turn.ttft_s for turn in self.turns]
        whole = [turn.turn_s for turn in self.turns]
        later = [turn.turn_s for turn in self.turns if turn.index]
        figures = {
            "makespan_s": self.makespan_s,
            "ttft_p50_s": statistics.median(ttft),
            "ttft_p95_s": percentile(ttft, 95),
            "turn_p50_s": statistics.median(whole),
            "turn_p95_s": percentile(whole, 95),
            "later_turn_p50_s": statistics.median(later or whole),
        }
        told = [turn.served for turn in self.turns if turn.served.cached is not None]
        if told and (total := sum(served.prompt or 0 for served in told)):
            figures["cached_share"] = sum(served.cached or 0 for served in told) / total
        return {name: round(value, 4) for name, value in figures.items()}


async def play(
    system: System,
    sessions: list[list[TokenTurn]],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> Played:
    """Let every session play to its end on a system that is started.

    Raises SystemFailed when it did not do the work that it was given.
    """
    started = clock()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_session(system, number, turns, clock, sleep))
                for number, turns in enumerate(sessions)
            ]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    makespan = clock() - started
    return Played(makespan, [times for task in tasks for times in task.result()])


async def _session(
    system: System, number: int, turns: list[TokenTurn], clock: Callable[[], float], sleep: Sleep
) -> list[TurnTimes]:
    times = []
    prompt = 0
    for index, turn in enumerate(turns):
        first: list[float] = []
        begun = clock()
        served = await system.turn(number, index, lambda: first.append(clock()))  # noqa: B023
        ended = clock()
        prompt += len(turn.new)
        _check(served, turn, prompt, f"session {number}, turn {index}")
        prompt += turn.output
        times.append(TurnTimes(number, index, (first or [ended])[0] - begun, ended - begun, served))
        if index + 1 < len(turns):
            await sleep(turn.gap_s)
    return times


def _check(served: Served, turn: TokenTurn, prompt: int, place: str) -> None:
    """Raise SystemFailed where the system did more or less work than the others."""
    if served.output != turn.output:
        raise SystemFailed(f"{place}: {served.output} tokens instead of {turn.output}")
    if served.prompt is not None and served.prompt != prompt:
        raise SystemFailed(f"{place}: a prompt of {served.prompt} tokens instead of {prompt}")
