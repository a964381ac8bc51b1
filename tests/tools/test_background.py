"""Work in a background loop: its results, its errors, and the end of what is stopped."""

import asyncio
import contextlib
import threading
from concurrent.futures import CancelledError, wait

import pytest
from agentserve_tools.background import BackgroundLoop


@pytest.fixture
def loop():
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


async def value():
    return 7


async def failure():
    raise ZeroDivisionError


def test_a_job_has_the_result_or_the_error_of_its_work(loop):
    assert loop.start(value()).ended.result(20) == 7
    with pytest.raises(ZeroDivisionError):
        loop.start(failure()).ended.result(20)


def test_a_stopped_job_has_ended_when_nothing_of_it_runs_any_more(loop):
    order = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            order.append("cleaned up")

    job = loop.start(slow())
    loop.submit(asyncio.sleep(0)).result(20)
    job.stop()
    assert wait([job.ended], timeout=20).not_done == set()
    order.append("ended")
    assert order == ["cleaned up", "ended"]
    with pytest.raises(CancelledError):
        job.ended.result(0)


def test_a_job_that_is_stopped_before_it_begins_never_runs(loop):
    ran = []

    async def work():
        ran.append(1)

    async def blocked():
        job = loop.start(work())  # the loop gets to it after this
        job.stop()
        return job

    job = loop.submit(blocked()).result(20)
    assert wait([job.ended], timeout=20).not_done == set()
    assert ran == []


def test_closing_cancels_what_still_runs():
    loop = BackgroundLoop("test")
    job = loop.start(asyncio.sleep(600))
    loop.close()
    assert job.ended.cancelled()
    loop.close()


def test_closing_does_not_wait_for_ever_for_work_that_ignores_its_cancellation(monkeypatch):
    monkeypatch.setattr("agentserve_tools.background._CLOSE_S", 0.01)
    loop, begun, threads = BackgroundLoop("stubborn"), threading.Event(), threading.active_count()

    async def stubborn():
        begun.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    job = loop.start(stubborn())
    assert begun.wait(20)
    loop.close()
    assert threading.active_count() == threads - 1
    assert not job.ended.done()
