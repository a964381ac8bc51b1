"""A call id runs at most once, and answers the same again."""

import asyncio

import pytest
from agentserve_tools import Executor, Toolbox


async def test_a_call_id_runs_once_and_answers_the_same_again():
    ran = []

    def count() -> int:
        ran.append(1)
        return len(ran)

    one = Executor(Toolbox([count]))
    assert not one.has_run("call_1")
    first = await one.run("count", {}, call_id="call_1")
    again = await one.run("count", {}, call_id="call_1")
    assert (first, first.output, len(ran)) == (again, 1, 1)
    assert one.has_run("call_1")
    assert (await one.run("count", {}, call_id="call_2")).output == 2


async def test_a_call_id_that_runs_is_joined_not_run_again():
    ran, go_on = [], asyncio.Event()

    async def slow() -> int:
        ran.append(1)
        await go_on.wait()
        return len(ran)

    run = Executor(Toolbox([slow])).run
    both = [asyncio.create_task(run("slow", {}, call_id="call_1")) for _ in range(2)]
    await asyncio.sleep(0)
    go_on.set()
    assert [(await one).output for one in both] == [1, 1]


async def test_a_call_that_was_cancelled_stays_cancelled():
    started = asyncio.Event()

    async def slow() -> None:
        started.set()
        await asyncio.sleep(60)

    run = Executor(Toolbox([slow])).run
    task = asyncio.create_task(run("slow", {}, call_id="call_1"))
    joined = asyncio.create_task(run("slow", {}, call_id="call_1"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await joined).status == "cancelled"
    assert (await run("slow", {}, call_id="call_1")).status == "cancelled"


async def test_outputs_are_forgotten_some_time_and_calls_never():
    ran = []

    def count(n: int) -> int:
        ran.append(n)
        return n

    run = Executor(Toolbox([count])).run
    for n in range(300):
        await run("count", {"n": n}, call_id=f"call_{n}")
    assert (await run("count", {"n": 299}, call_id="call_299")).output == 299
    forgotten = await run("count", {"n": 0}, call_id="call_0")
    assert (forgotten.status, len(ran)) == ("error", 300)
