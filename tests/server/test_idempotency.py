import asyncio

import pytest

from agentserve.clock import VirtualClock
from agentserve.errors import IdempotencyMismatch, InvalidRequest, Overloaded
from agentserve.server.idempotency import ENTRY_OVERHEAD, Answer, AnswerLedger, check_key

SCOPE = ("local", "POST /sessions", "k")


class Work:
    """Counts how often it really ran; a gate holds it back."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.body = body

    async def __call__(self) -> Answer:
        self.runs += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return Answer(200, self.body)


async def test_the_same_body_is_run_once_and_replayed() -> None:
    ledger, work = AnswerLedger(VirtualClock()), Work()
    assert await ledger.once(SCOPE, b"x", work) == (Answer(200, b"{}"), False)
    assert await ledger.once(SCOPE, b"x", work) == (Answer(200, b"{}"), True)
    assert work.runs == 1


async def test_another_body_under_the_same_key_is_refused() -> None:
    ledger, work = AnswerLedger(VirtualClock()), Work()
    await ledger.once(SCOPE, b"x", work)
    with pytest.raises(IdempotencyMismatch):
        await ledger.once(SCOPE, b"y", work)


@pytest.mark.parametrize(
    "other", [("key-2", *SCOPE[1:]), ("local", "POST /other", "k"), ("local", SCOPE[1], "k2")]
)
async def test_principal_path_and_key_each_separate_answers(other: tuple[str, str, str]) -> None:
    ledger, work = AnswerLedger(VirtualClock()), Work()
    await ledger.once(SCOPE, b"x", work)
    _, replayed = await ledger.once(other, b"y", work)
    assert not replayed
    assert work.runs == 2


async def test_a_second_request_joins_the_one_that_still_runs() -> None:
    ledger, work = AnswerLedger(VirtualClock()), Work()
    work.gate.clear()
    first = asyncio.create_task(ledger.once(SCOPE, b"x", work))
    second = asyncio.create_task(ledger.once(SCOPE, b"x", work))
    await asyncio.sleep(0)
    work.gate.set()
    assert await first == (Answer(200, b"{}"), False)
    assert await second == (Answer(200, b"{}"), True)
    assert work.runs == 1


async def test_a_joined_request_that_leaves_does_not_stop_the_first() -> None:
    ledger, work = AnswerLedger(VirtualClock()), Work()
    work.gate.clear()
    first = asyncio.create_task(ledger.once(SCOPE, b"x", work))
    await asyncio.sleep(0)
    second = asyncio.create_task(ledger.once(SCOPE, b"x", work))
    await asyncio.sleep(0)
    second.cancel()
    work.gate.set()
    assert (await first)[0] == Answer(200, b"{}")


async def test_a_refused_request_leaves_its_key_free() -> None:
    ledger, work = AnswerLedger(VirtualClock()), Work()
    work.failure = Overloaded("full")
    with pytest.raises(Overloaded):
        await ledger.once(SCOPE, b"x", work)
    work.failure = None
    assert await ledger.once(SCOPE, b"x", work) == (Answer(200, b"{}"), False)


async def test_those_who_wait_get_the_same_refusal() -> None:
    ledger, work = AnswerLedger(VirtualClock()), Work()
    work.gate.clear()
    work.failure = Overloaded("full")
    both = [asyncio.create_task(ledger.once(SCOPE, b"x", work)) for _ in range(2)]
    await asyncio.sleep(0)
    work.gate.set()
    results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(result) for result in results] == [Overloaded, Overloaded]
    assert work.runs == 1


async def test_answers_are_forgotten_after_a_day() -> None:
    clock = VirtualClock()
    ledger, work = AnswerLedger(clock), Work()
    await ledger.once(SCOPE, b"x", work)
    clock.advance(24 * 3600 - 1)
    assert (await ledger.once(SCOPE, b"x", work))[1]
    clock.advance(2)
    assert not (await ledger.once(SCOPE, b"y", work))[1]


async def test_the_oldest_answers_make_room_by_count_and_by_bytes() -> None:
    by_count = AnswerLedger(VirtualClock(), max_entries=3)
    by_bytes = AnswerLedger(VirtualClock(), max_bytes=3 * (ENTRY_OVERHEAD + 100))
    for ledger in (by_count, by_bytes):
        for index in range(50):
            await ledger.once(("local", "POST /x", str(index)), b"x", Work(b"a" * 100))
        assert len(ledger) == 3
        assert ledger.bytes == 3 * (ENTRY_OVERHEAD + 100)
        newest = Work(b"a" * 100)
        assert (await ledger.once(("local", "POST /x", "49"), b"x", newest))[1]
        assert not (await ledger.once(("local", "POST /x", "0"), b"x", newest))[1]


async def test_a_running_request_is_never_dropped_for_room() -> None:
    ledger, held = AnswerLedger(VirtualClock(), max_entries=1), Work()
    held.gate.clear()
    first = asyncio.create_task(ledger.once(SCOPE, b"x", held))
    await asyncio.sleep(0)
    for index in range(5):
        await ledger.once(("local", "POST /x", str(index)), b"x", Work())
    joined = asyncio.create_task(ledger.once(SCOPE, b"x", held))
    await asyncio.sleep(0)
    held.gate.set()
    assert (await first)[0] == (await joined)[0]
    assert held.runs == 1


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_must_have_a_sane_length(key: str) -> None:
    with pytest.raises(InvalidRequest):
        check_key(key)
