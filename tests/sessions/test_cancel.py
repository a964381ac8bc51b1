"""Turns that are cancelled, and turns whose readers go and come back."""

import asyncio

import pytest
from session_rig import TOOLS, calls, result, rig

from agentserve import wire
from agentserve.errors import TurnNotFound


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


async def test_a_turn_cancelled_while_it_waits_for_its_grammar_leaves_the_engine_s_log_known():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        await r.turn(s, "hello")
        await r.call("patch", s, tools=TOOLS[:1])  # the log will differ near its beginning
        mirror = r.session(s).mirror
        known = r.link.log(r.session(s))
        r.link.hold = True
        handle = await r.start(s, "go on")
        waiting = asyncio.ensure_future(r.call("cancel", s))
        await r.settle()
        r.link.release()
        await waiting
        assert (await handle.result()).status == "cancelled"
        assert r.link.log(r.session(s)) == mirror.tokens == known
