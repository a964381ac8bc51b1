"""A call that somebody must allow runs only when they do."""

import asyncio

import msgspec
import pytest
from agentserve_tools import Executor, Toolbox, allow_read_only, tool


def executor(*functions, **limits) -> Executor:
    return Executor(Toolbox(functions), **limits)


def add(a: int, b: int = 1) -> int:
    return a + b


@pytest.mark.parametrize(
    ("verdict", "status", "output"),
    [
        (True, "ok", 3),
        (False, "cancelled", "the call of add was not allowed"),
        ("too risky", "cancelled", "the call of add was not allowed: too risky"),
        (None, "cancelled", "the call of add was not allowed"),
    ],
)
@pytest.mark.parametrize("kind", ["function", "coroutine", "awaitable"])
async def test_a_call_runs_only_when_it_is_allowed(verdict, status, output, kind):
    asked = []

    def function(spec, arguments):
        asked.append((spec.name, arguments))
        return verdict

    async def coroutine(spec, arguments):
        return function(spec, arguments)

    approve = {
        "function": function,
        "coroutine": coroutine,
        "awaitable": lambda spec, arguments: coroutine(spec, arguments),
    }[kind]
    answer = await executor(add, approve=approve).run("add", {"a": 2})
    assert (answer.status, answer.output, asked) == (status, output, [("add", {"a": 2})])


async def test_the_approval_of_one_call_goes_before_that_of_the_executor():
    one = executor(add, approve=lambda spec, arguments: False)
    assert (await one.run("add", {"a": 2}, approve=lambda spec, arguments: True)).output == 3


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, StopIteration])
async def test_an_approval_that_fails_refuses(error):
    def broken(spec, arguments):
        raise error

    refused = await executor(add, approve=broken).run("add", {"a": 2})
    assert (refused.status, refused.output) == (
        "cancelled",
        f"the call of add was not allowed: asking failed: {error.__name__}",
    )


async def test_an_approval_that_takes_long_is_waited_for():
    async def slow(spec, arguments):
        await asyncio.sleep(0.1)
        return True

    assert (await executor(add, approve=slow, deadline_s=0.05).run("add", {"a": 2})).output == 3


async def test_what_cannot_run_is_not_asked_for():
    def never(spec, arguments):
        raise AssertionError

    run = executor(add, approve=never).run
    assert "invalid arguments" in (await run("add", {"a": "x"})).output
    assert "no tool named" in (await run("sub", {})).output


async def test_read_only_tools_can_be_allowed_alone():
    @tool(read_only=True)
    def look() -> str:
        return "seen"

    run = executor(add, look, approve=allow_read_only).run
    assert (await run("look", {})).output == "seen"
    refused = (await run("add", {"a": 1})).output
    assert refused.endswith("not allowed: only tools that change nothing are allowed")


async def test_an_approval_may_give_any_reason():
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        def __bool__(self) -> bool:
            raise RuntimeError("no truth")

    for reason in (Odd(), "\udce9"):
        refused = await executor(add).run("add", {"a": 1}, approve=lambda *_, it=reason: it)
        assert refused.status == "cancelled"
        assert msgspec.json.encode(refused.output)
