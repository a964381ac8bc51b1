"""Calls are bounded in time, output and number, and never raise."""

import asyncio
import contextlib
import contextvars
import os
import re
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from agentserve_tools import Executor, Toolbox, ToolOutput, tool


def stored(path: str) -> str:
    return Path(path).read_text()


def executor(*functions, **limits) -> Executor:
    return Executor(Toolbox(functions), **limits)


def add(a: int, b: int = 1) -> int:
    return a + b


async def test_plain_and_async_functions_answer():
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    class Square:
        async def __call__(self, n: int) -> int:
            return n * n

    run = executor(add, double, Square()).run
    assert (await run("add", {"a": 2})).output == 3
    assert (await run("double", {"n": 2})).output == 4
    assert (await run("Square", {"n": 3})).output == 9


async def test_a_plain_function_that_returns_an_awaitable_is_awaited():
    async def inner() -> str:
        return "inner"

    def outer() -> object:
        return inner()

    assert (await executor(outer).run("outer", {})).output == "inner"


async def test_invalid_arguments_and_unknown_tools_are_told_to_the_model():
    run = executor(add).run
    wrong = await run("add", {"a": "two"})
    assert wrong.is_error
    assert wrong.output == "invalid arguments for add: argument a: Expected `int`, got `str`"
    unknown = await run("sub", {})
    assert unknown.status == "error"
    assert unknown.output == "there is no tool named sub; the tools are: add"
    assert len((await run("x" * 100_000, {})).output) < 200
    many = [tool(name=f"{number:064d}")(lambda: None) for number in range(500)]
    assert len((await executor(*many).run("sub", {})).output) == 2000


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such row"), "ValueError: no such row"),
        (KeyError(), "KeyError"),
        (RuntimeError("x" * 10_000), "RuntimeError: " + "x" * 486),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration("over"), "StopIteration: over"),
    ],
)
async def test_an_exception_becomes_a_short_error(error, text):
    def fail() -> None:
        raise error

    answer = await executor(fail).run("fail", {})
    assert (answer.status, answer.output) == ("error", text)


async def test_one_failure_does_not_end_its_siblings_and_order_is_kept():
    async def wait(ms: int) -> int:
        await asyncio.sleep(ms / 1000)
        return ms

    def fail() -> None:
        raise ValueError("no")

    answers = await executor(wait, fail).run_all(
        [("wait", {"ms": 60}), ("fail", {}), ("wait", {"ms": 1}), ("nothing", {})]
    )
    assert [a.status for a in answers] == ["ok", "error", "ok", "error"]
    assert [a.output for a in answers if a.status == "ok"] == [60, 1]


async def test_calls_run_at_the_same_time():
    meeting = threading.Barrier(4, timeout=10)

    def meet() -> int:
        return meeting.wait()

    answers = await executor(meet).run_all([("meet", {})] * 4)
    assert sorted(a.output for a in answers) == [0, 1, 2, 3]


async def test_a_late_thread_is_answered_for_and_its_result_is_discarded():
    release, done = threading.Event(), threading.Event()

    def slow() -> str:
        release.wait(10)
        done.set()
        return "late"

    answer = await executor(slow).run("slow", {}, deadline_s=0.05)
    assert (answer.status, answer.output) == ("error", "slow did not finish within 0.05 s")
    assert answer.duration_ms >= 50
    release.set()
    assert done.wait(10)


async def test_an_async_tool_is_really_cancelled_at_the_deadline():
    cancelled = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    assert (await executor(slow, deadline_s=0.02).run("slow", {})).is_error
    assert cancelled.is_set()


class Stubborn:
    """An async tool that ignores its cancellation until it is released."""

    def __init__(self) -> None:
        self.started, self.release = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> str:
        self.started.set()
        while not self.release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.release.wait()
        return "late"


async def test_an_async_tool_that_ignores_its_cancellation_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("agentserve_tools.executor._CLEANUP_S", 0.01)
    stubborn = Stubborn()
    run = executor(stubborn, add, max_concurrency=1).run
    late = await asyncio.wait_for(run("Stubborn", {}, call_id="call_1", deadline_s=0.02), 10)
    assert (late.status, late.output) == ("error", "Stubborn did not finish within 0.02 s")
    # Its place is taken until it ends.
    assert (await run("add", {"a": 1}, deadline_s=0.02)).is_error
    stubborn.release.set()
    assert (await run("add", {"a": 1}, deadline_s=10)).output == 2
    assert await run("Stubborn", {}, call_id="call_1") == late


async def test_a_caller_that_is_cancelled_does_not_wait_for_a_tool_that_ignores_it(monkeypatch):
    monkeypatch.setattr("agentserve_tools.executor._CLEANUP_S", 0.01)
    stubborn = Stubborn()
    task = asyncio.create_task(executor(stubborn).run("Stubborn", {}))
    await stubborn.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), 10)
    assert task.cancelled()
    stubborn.release.set()


async def test_a_tool_keeps_its_own_concurrency_limit_until_a_late_thread_has_ended():
    release = threading.Event()

    @tool(max_concurrency=1)
    def hold(wait: bool) -> str:
        return str(release.wait(10)) if wait else "free"

    run = executor(hold).run
    assert (await run("hold", {"wait": True}, deadline_s=0.02)).is_error
    assert (await run("hold", {"wait": False}, deadline_s=0.05)).is_error
    release.set()
    assert (await run("hold", {"wait": False}, deadline_s=10)).output == "free"


async def test_no_more_calls_run_at_once_than_allowed():
    running, peak = 0, 0

    async def count() -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.005)
        running -= 1

    await executor(count, max_concurrency=3).run_all([("count", {})] * 10)
    assert peak == 3


async def test_cancelling_the_caller_cancels_the_call():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    task = asyncio.create_task(executor(slow).run("slow", {}))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_a_tool_that_cancels_itself_answers_cancelled():
    async def give_up() -> None:
        raise asyncio.CancelledError

    assert (await executor(give_up).run("give_up", {})).status == "cancelled"


async def test_output_is_capped_and_says_so():
    def long() -> str:
        return "a" * 500 + "z" * 500

    answer = await executor(long, max_output=10, keep_whole=False).run("long", {})
    assert answer.truncated
    assert answer.output == "aaaaa\n[... 990 characters left out ...]\nzzzzz"


async def test_the_whole_of_a_cut_output_is_in_a_file_that_the_result_names():
    def long() -> str:
        return "a" * 500 + "z" * 500

    answer = await executor(long, max_output=10).run("long", {})
    (path,) = re.findall(r"990 characters left out; the whole is in (\S+) \.\.\.\]", answer.output)
    assert stored(path) == long()
    assert os.stat(path).st_mode & 0o077 == 0


async def test_a_tool_chooses_its_own_status():
    def refuse() -> ToolOutput:
        return ToolOutput("not today", status="cancelled")

    answer = await executor(refuse).run("refuse", {})
    assert (answer.status, answer.output) == ("cancelled", "not today")


async def test_durations_are_recorded_in_milliseconds():
    def nap() -> None:
        time.sleep(0.03)

    assert (await executor(nap).run("nap", {})).duration_ms >= 29


async def test_context_variables_reach_the_thread():
    who = contextvars.ContextVar("who", default="nobody")
    who.set("caller")

    def ask() -> str:
        return who.get()

    assert (await executor(ask).run("ask", {})).output == "caller"


async def test_durations_are_kept_for_each_tool_and_their_median_is_expected():
    @tool(expected_ms=700)
    async def nap(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    one = executor(nap)
    assert (one.expected_ms("nap"), one.expected_ms("other"), one.durations_ms) == (700, None, {})
    for ms in (1, 40, 1):
        await one.run("nap", {"ms": ms})
    await one.run("nap", {"ms": "wrong"})
    assert len(one.durations_ms["nap"]) == 3
    assert one.expected_ms("nap") == sorted(one.durations_ms["nap"])[1]


def test_a_thread_that_never_ends_does_not_keep_the_program_alive():
    import subprocess

    program = (
        "import asyncio, time\n"
        "from agentserve_tools import Executor, Toolbox\n"
        "def hang() -> None: time.sleep(3600)\n"
        "async def main():\n"
        "    print((await Executor(Toolbox([hang]), deadline_s=0.05).run('hang', {})).status)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "error\n"


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fails() -> str:
    raise Silent


async def fails_later() -> str:
    raise Silent


async def leaves() -> str:
    sys.exit(3)


async def fails_in_a_group() -> str:
    raise BaseExceptionGroup("several", [SystemExit(1)])


def gives_no_text() -> object:
    return Silent()


def gives_a_huge_number() -> object:
    return {"digits": 10**5000}


def gives_a_deep_list() -> object:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def gives_bytes_of_a_file_name() -> str:
    return "caf\udce9.txt"


def says_bytes_of_a_file_name() -> str:
    raise ValueError("no caf\udce9.txt")


@pytest.mark.parametrize(
    "function",
    [
        fails,
        fails_later,
        leaves,
        fails_in_a_group,
        gives_no_text,
        gives_a_huge_number,
        gives_a_deep_list,
        gives_bytes_of_a_file_name,
        says_bytes_of_a_file_name,
    ],
)
async def test_whatever_a_tool_does_its_answer_can_be_sent(function):
    run = executor(function, deadline_s=30, max_concurrency=1).run
    for _ in range(2):  # the place is free again
        answer = await asyncio.wait_for(run(function.__name__, {}), 10)
        assert "did not finish" not in msgspec.json.encode(answer.output).decode()
