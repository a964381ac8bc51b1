"""Who may see a session, how long it lives, and what happens when readers or the engine go."""

import asyncio

import pytest
from session_rig import TOOLS, calls, convert, result, rig

from agentserve import wire
from agentserve.errors import (
    AgentserveError,
    Draining,
    EngineDown,
    InvalidRequest,
    ModelLoading,
    QuotaExceeded,
    SessionClosed,
    SessionNotFound,
    TurnNotFound,
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


async def test_a_turn_whose_readers_are_gone_is_cancelled_after_the_grace_period():
    async with rig(disconnect_grace_s=5.0) as r:
        s, other = await r.create(), await r.create()
        r.link.hold = True
        gone = await r.start(s)
        kept = await r.start(other, on_disconnect="continue")
        for handle in (gone, kept):
            handle.attach()
            handle.detach()
        r.clock.advance(4.9)
        await r.service.sweep()
        assert r.session(s).running.cancel is None
        gone.attach()
        r.clock.advance(10)
        await r.service.sweep()
        assert r.session(s).running.cancel is None
        gone.detach()
        r.clock.advance(5.1)
        await r.service.sweep()
        r.link.release()
        assert (await gone.result()).status == "cancelled"
        assert (await kept.result()).status in ("completed", "incomplete")


async def test_a_turn_can_be_followed_while_it_runs_and_after_it_ended():
    async with rig() as r:
        s = await r.create()
        handle = await r.start(s)
        running = await r.service.follow("local", s, handle.turn_id)
        turn = await running.result()
        events = [event async for _, event in running.events()]
        for _ in range(12):
            await r.turn(s)
        late = await r.service.follow("local", s, handle.turn_id)
        assert [event async for _, event in late.events()] == [wire.TurnDone(turn)]
        assert events[-1] == wire.TurnDone(turn)
        with pytest.raises(TurnNotFound):
            await r.service.follow("local", s, "t_99")


async def test_an_engine_that_dies_fails_the_turn_and_the_next_one_equals_an_untouched_twin_s():
    async with rig() as r:
        s, twin = await r.create(), await r.create()
        for one in (s, twin):
            await r.turn(one, "hello", max_output_tokens=20)
        before = await r.tokens(s)
        r.link.hold = True
        handle = await r.start(s, "go on", max_output_tokens=30)
        await r.steps(4)
        r.link.crash()
        turn = await handle.result()
        assert (turn.status, turn.error.code, turn.error.retryable) == (
            "failed",
            "engine_down",
            True,
        )
        assert isinstance([event async for _, event in handle.events()][-1], wire.ErrorEvent)
        assert r.service.ready() == (False, "engine down: killed")
        with pytest.raises(EngineDown):
            await r.start(s, "go on")
        assert await r.tokens(s) == before
        r.link.hold = False
        r.link.start()
        await r.settle(10)
        assert r.service.ready() == (True, "ready")
        again = await r.turn(s, "go on", max_output_tokens=30)
        assert {part.reason for part in again.usage.recomputed} == {"engine_restarted"}
        await r.turn(twin, "go on", max_output_tokens=30)
        assert await r.tokens(s) == await r.tokens(twin)


async def test_a_sequence_that_the_engine_lost_is_sent_again_whole():
    async with rig() as r:
        s = await r.create()
        await r.turn(s, "hello")
        r.link.engine._close(r.session(s).mirror.sequence)
        turn = await r.turn(s, "go on")
        assert turn.status in ("completed", "incomplete")
        assert r.link.log(r.session(s)).tolist() == await r.tokens(s)


async def test_a_fault_in_one_turn_is_an_error_and_the_session_goes_on():
    async with rig(oracle={"max_context": 512}) as r:
        s = await r.create()
        await r.turn(s, "hello")
        before = await r.tokens(s)
        r.link.hold = True
        handle = await r.start(s, "go on")
        (engine_turn,) = r.link.engine._turns.values()
        engine_turn.fault = "grammar: broken"
        r.link.engine._finish(engine_turn, "error")
        r.link.release()
        turn = await handle.result()
        assert (turn.status, turn.error.code) == ("failed", "engine_error")
        assert await r.tokens(s) == before
        assert (await r.turn(s, "go on")).status in ("completed", "incomplete")


async def test_a_fault_of_the_server_in_one_turn_ends_that_turn_only(caplog):
    async with rig() as r:
        s, other = await r.create(), await r.create()
        for one in (s, other):
            await r.turn(one, "hello")
        before = await r.tokens(s)
        r.link.hold = True
        handle, neighbour = await r.start(s, "go"), await r.start(other, "go")
        r.session(s).running.output.push = None
        r.link.release()
        turn = await handle.result()
        assert (turn.status, turn.error.code) == ("failed", "engine_error")
        assert "fault=server" in caplog.text
        assert (await neighbour.result()).status in ("completed", "incomplete")
        assert await r.tokens(s) == before
        assert (await r.turn(s, "go")).status in ("completed", "incomplete")
        assert await r.tokens(s) == await r.tokens(other)


async def test_cancel_is_idempotent_and_names_a_turn():
    async with rig() as r:
        s = await r.create()
        with pytest.raises(TurnNotFound):
            await r.call("cancel", s)
        r.link.hold = True
        handle = await r.start(s)
        waiting = asyncio.gather(
            r.call("cancel", s), r.call("cancel", s, turn=handle.turn_id, keep="partial")
        )
        await r.settle()
        r.link.release()
        first, second = await waiting
        assert first == second == await r.call("cancel", s)
        assert first.status == "cancelled"
        with pytest.raises(TurnNotFound):
            await r.call("cancel", s, turn="t_44")


@pytest.mark.parametrize("keep", ["none", "input", "partial"])
async def test_cancel_at_each_token_leaves_what_was_asked_for(keep):
    async with rig(oracle={"stop_one_in": 0}) as r:
        for steps in range(6):
            s, twin = await r.create(), await r.create()
            for one in (s, twin):
                await r.turn(one, "hello")
            before = await r.tokens(s)
            r.link.hold = True
            handle = await r.start(s, "tell me", max_output_tokens=50)
            await r.steps(steps)
            r.link.release()
            turn = await r.call("cancel", s, keep=keep)
            assert (await handle.result()).status == "cancelled"
            tokens = await r.tokens(s)
            if keep == "none":
                assert tokens == before
                await r.turn(twin, "and now?")
            elif keep == "input" or not turn.output:
                await r.turn(twin, "tell me", max_output_tokens=0)
                assert tokens == await r.tokens(twin)
                await r.turn(twin, "and now?")
            else:
                kept = len(turn.output[0].text)
                assert kept
                await r.turn(twin, "tell me", max_output_tokens=turn.usage.output_tokens)
                assert tokens == await r.tokens(twin)
                await r.turn(twin, "and now?")
            after = await r.turn(s, "and now?")
            assert after.usage.recomputed == []
            assert await r.tokens(s) == await r.tokens(twin)


async def test_a_partial_cancel_keeps_whole_calls_and_drops_an_open_one():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        r.link.hold = True
        handle = await r.start_forced(s, "go", ("read", {"q": "a"}), ("write", {"q": "long " * 9}))
        while not r.session(s).running.sent_calls():
            await r.steps(1)
        await r.steps(12)
        r.link.release()
        turn = await r.call("cancel", s, keep="partial")
        assert await handle.result() == turn
        assert len(calls(turn)) == 1
        assert [call.call_id for call in turn.pending_calls] == calls(turn)
        await r.forced(s, [result(calls(turn)[0])], "fine")
        assert "write" not in r.text.tokenizer.decode(await r.tokens(s)).split("user\ngo", 1)[1]


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


async def test_an_invalid_request_leaves_no_trace():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        with pytest.raises(InvalidRequest):
            await r.start(s, [])
        assert (await r.service.info("local", s)).state == "idle"
