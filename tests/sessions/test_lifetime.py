"""Who may see a session, how long it lives, and what a server tells of itself."""

import asyncio

import pytest
from session_rig import TOOLS, calls, convert, result, rig

from agentserve import wire
from agentserve.errors import (
    AgentserveError,
    Draining,
    ModelLoading,
    QuotaExceeded,
    SessionClosed,
    SessionNotFound,
)


async def every_call(r, principal, s):
    """Yield each service call on session `s` as a principal."""
    service = r.service
    yield service.info(principal, s)
    yield service.turns(principal, s)
    yield service.turn(principal, s, "t_1")
    yield service.patch(principal, s, wire.PatchRequest())
    yield service.start_turn(principal, s, wire.TurnRequest(input="x"))
    yield service.follow(principal, s, "t_1")
    yield service.tool_results(
        principal, s, convert(wire.ToolResultsRequest, results=[result("c")])
    )
    yield service.hints(principal, s, wire.Hints())
    yield service.fork(principal, s, wire.ForkRequest())
    yield service.rollback(principal, s, wire.RollbackRequest(to="t_1"))
    yield service.history(principal, s, wire.HistoryRequest(items=[]))
    yield service.count(principal, s, wire.CountRequest(input="x"))
    yield service.cancel(principal, s, wire.CancelRequest())
    yield service.transcript(principal, s, "items")
    yield service.delete(principal, s, keep_transcript=False)


async def answer_of(call):
    with pytest.raises(AgentserveError) as raised:
        await call
    error = raised.value
    return type(error), error.message, error.param, error.details


async def test_another_principal_s_session_looks_exactly_like_an_absent_one():
    async with rig() as r:
        s = await r.create(id="secret")
        await r.turn(s)
        theirs = [await answer_of(call) async for call in every_call(r, "eve", s)]
        absent = [await answer_of(call) async for call in every_call(r, "eve", "nothing")]
        assert theirs == absent
        assert {kind for kind, *_ in theirs} == {SessionNotFound}
        assert (await r.service.list("eve")).sessions == []
        assert await r.create("eve", id="secret") == "secret"
        assert (await r.service.info("eve", s)).turns == 0
        assert (await r.service.info("local", s)).turns == 1


async def test_a_deleted_session_is_closed_for_its_owner_and_absent_for_others():
    async with rig() as r:
        s = await r.create()
        await r.turn(s)
        await r.service.delete("local", s, keep_transcript=False)
        assert {(await answer_of(c))[0] async for c in every_call(r, "local", s)} == {SessionClosed}
        assert {(await answer_of(c))[0] async for c in every_call(r, "eve", s)} == {SessionNotFound}
        assert r.store.size == 0
        assert r.link.engine.stats().blocks_locked == 0


async def test_a_closed_session_with_a_kept_transcript_can_be_read_only():
    async with rig() as r:
        s = await r.create()
        await r.turn(s)
        await r.service.delete("local", s, keep_transcript=True)
        assert (await r.service.info("local", s)).state == "closed"
        assert len(await r.service.transcript("local", s, "items")) >= 1
        assert len((await r.service.turns("local", s)).turns) == 1
        with pytest.raises(SessionClosed):
            await r.turn(s)
        await r.service.delete("local", s, keep_transcript=False)
        with pytest.raises(SessionClosed):
            await r.service.transcript("local", s, "items")


async def test_deleting_a_session_cancels_its_turns():
    async with rig() as r:
        s = await r.create()
        r.link.hold = True
        running = await r.start(s, "a")
        queued = await r.start(s, "b", when_busy="queue")
        r.link.release()
        await r.service.delete("local", s, keep_transcript=False)
        assert (await running.result()).status == "cancelled"
        assert (await queued.result()).status == "cancelled"


async def test_sessions_are_bounded_for_each_principal():
    async with rig(max_sessions=3) as r:
        ids = [await r.create() for _ in range(2)]
        with pytest.raises(QuotaExceeded):
            await r.call("fork", ids[0], n=2)
        ids.append(await r.create())
        with pytest.raises(QuotaExceeded):
            await r.create()
        await r.create("somebody else")
        await r.service.delete("local", ids[0], keep_transcript=False)
        await r.create()


async def test_sessions_live_until_deleted_unless_a_ttl_is_given():
    async with rig() as r:
        forever, short = await r.create(), await r.create(ttl_ms=60_000)
        r.clock.advance(50)
        await r.turn(short)
        r.clock.advance(50)
        await r.service.sweep()
        assert (await r.service.info("local", short)).expires_at is not None
        r.clock.advance(20)
        await r.service.sweep()
        with pytest.raises(SessionClosed):
            await r.service.info("local", short)
        r.clock.advance(10**8)
        await r.service.sweep()
        assert (await r.service.info("local", forever)).expires_at is None


async def test_sessions_are_listed_in_pages_by_state():
    async with rig() as r:
        ids = [await r.create(tools=TOOLS) for _ in range(5)]
        await r.forced(ids[3], "go", ("read", {"q": "x"}))
        page = await r.service.list("local", limit=2)
        assert [one.id for one in page.sessions] == ids[:2]
        rest = await r.service.list("local", after=page.next, limit=100)
        assert [one.id for one in rest.sessions] == ids[2:]
        assert rest.next is None
        waiting = await r.service.list("local", state="awaiting_tools")
        assert [one.id for one in waiting.sessions] == [ids[3]]
        assert [one.id for one in (await r.service.list("local", tier="device")).sessions] == [
            ids[3]
        ]


async def test_a_session_hinted_to_close_closes_when_a_turn_leaves_nothing_pending():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        asked = await r.forced(s, "go", ("read", {"q": "a"}), hints={"close": True})
        assert (await r.service.info("local", s)).state == "awaiting_tools"
        done = await r.forced(s, [result(calls(asked)[0])], "It is done.")
        assert done.status == "completed"
        assert (await r.service.info("local", s)).state == "closed"
        assert len((await r.service.turns("local", s)).turns) == 2
        assert (await r.service.info("local", s)).kv.device == 0
        assert r.link.engine.stats().blocks_locked == 0
        with pytest.raises(SessionClosed):
            await r.turn(s, "more")


async def test_a_close_hint_waits_for_queued_turns_and_a_failed_turn_does_not_close():
    async with rig() as r:
        s = await r.create()
        r.link.hold = True
        first = await r.start(s, "one", hints={"close": True})
        second = await r.start(s, "two", when_busy="queue")
        await r.call("cancel", s, turn=second.turn_id)
        third = await r.start(s, "three", when_busy="queue")
        r.link.crash()
        assert (await first.result()).status == (await third.result()).status == "failed"
        r.link.release()
        r.link.start()
        await r.settle(10)
        r.link.hold = True
        first = await r.start(s, "one")
        third = await r.start(s, "three", when_busy="queue")
        r.link.release()
        assert (await first.result()).status in ("completed", "incomplete")
        assert (await third.result()).previous == first.turn_id
        assert (await r.service.info("local", s)).state == "closed"


async def test_a_close_hint_on_an_idle_session_closes_it_and_other_hints_take_it_back():
    async with rig() as r:
        fresh, idle = await r.create(), await r.create()
        await r.service.hints("local", fresh, wire.Hints(close=True))
        await r.service.hints("local", fresh, wire.Hints())
        await r.turn(fresh)
        assert (await r.service.info("local", fresh)).state == "idle"
        await r.turn(idle)
        await r.service.hints("local", idle, wire.Hints(close=True))
        assert (await r.service.info("local", idle)).state == "closed"
        assert len(await r.service.transcript("local", idle, "items")) >= 1


async def test_draining_takes_no_new_turns_and_waits_for_open_ones():
    async with rig() as r:
        s = await r.create()
        r.link.hold = True
        handle = await r.start(s)
        drained = asyncio.create_task(r.service.drain())
        await r.settle()
        assert not drained.done()
        with pytest.raises(Draining):
            await r.start(s, when_busy="queue")
        r.link.release()
        await drained
        assert (await handle.result()).status in ("completed", "incomplete")


async def test_before_the_engine_has_spoken_the_model_is_loading():
    async with rig() as r:
        r.service.driver._info = None
        assert r.service.ready() == (False, "model loading")
        with pytest.raises(ModelLoading):
            await r.create()


async def test_a_silent_engine_is_not_ready():
    async with rig() as r:
        assert r.service.ready() == (True, "ready")
        r.clock.advance(11)
        ready, why = r.service.ready()
        assert not ready
        assert "silent" in why


async def test_stats_count_turns_tokens_and_sessions():
    async with rig() as r:
        s = await r.create()
        turn = await r.turn(s)
        stats = r.service.stats()
        assert stats.sessions == 1
        assert stats.states == {"idle": 1}
        assert stats.counters.turns == {turn.status: 1}
        assert stats.counters.new_tokens == turn.usage.new_tokens
        assert stats.store_bytes == r.store.size > 0
        assert (await r.service.info("local", s)).usage.output_tokens == turn.usage.output_tokens
