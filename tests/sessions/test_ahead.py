"""Staged results are prefilled while other tools run: cached later, provisional until then."""

import pytest
from session_rig import TOOLS, calls, result, rig
from text_models import tokenizer

from agentserve.engine.messages import Cancel
from agentserve.errors import EngineDown

THREE = (("read", {"q": "a"}), ("write", {"q": "b"}), ("search", {"q": "c"}))
LONG = "line of output " * 30


async def awaiting(r):
    s = await r.create(tools=TOOLS)
    return s, calls(await r.forced(s, "go", *THREE))


async def stage(r, s, *items):
    return await r.call("tool_results", s, results=list(items))


async def reference(r):
    """Return the log of a session that was given all results at once."""
    s, ids = await awaiting(r)
    await r.forced(s, [result(one, LONG) for one in ids], "ok")
    return await r.tokens(s)


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
async def test_the_longest_run_in_call_order_is_prefilled_and_cached_for_the_turn(name):
    async with rig(tokenizer=tokenizer(name)) as r:
        s, ids = await awaiting(r)
        expected = await reference(r)
        head = r.session(s).head
        prefilled = []
        for place in (2, 0, 1):
            answer = await stage(r, s, result(ids[place], LONG))
            prefilled.append(answer.prefilled_tokens)
            await r.settle()
            assert r.session(s).head is head
            assert await r.tokens(s) == expected[: head.length]
            mirror = r.session(s).mirror
            assert mirror.tokens.tolist() == expected[: len(mirror.tokens)]
            assert r.link.log(r.session(s)) == mirror.tokens
        assert prefilled[0] == 0
        assert prefilled[1] > 60
        assert prefilled[2] > prefilled[1]
        ahead = sum(prefilled)
        turn = await r.forced(s, [], "ok")
        usage = turn.usage
        assert usage.cached_tokens == head.length + ahead
        assert usage.new_tokens == usage.input_tokens - head.kv_length
        assert usage.recomputed == []
        assert usage.input_tokens - usage.cached_tokens < 8
        assert await r.tokens(s) == expected
        assert r.text.composer.mismatches == 0


async def test_every_token_of_the_results_is_computed_once():
    async with rig() as r:
        s, ids = await awaiting(r)
        before = r.link.engine.stats().prefill_tokens
        head = r.session(s).head
        for one in ids:
            await stage(r, s, result(one, LONG))
            await r.settle()
        turn = await r.forced(s, [], "ok")
        computed = r.link.engine.stats().prefill_tokens - before
        assert computed == turn.usage.input_tokens - head.kv_length == turn.usage.new_tokens


async def test_a_result_that_is_staged_twice_is_prefilled_once():
    async with rig() as r:
        s, ids = await awaiting(r)
        first = await stage(r, s, result(ids[0], LONG))
        again = await stage(r, s, result(ids[0], LONG))
        assert first.prefilled_tokens > 0
        assert again.prefilled_tokens == 0
        await r.settle()
        assert (await stage(r, s, result(ids[0], LONG))).prefilled_tokens == 0


async def test_results_staged_during_a_prefill_follow_it():
    async with rig() as r:
        s, ids = await awaiting(r)
        r.link.hold = True
        counts = [(await stage(r, s, result(one, LONG))).prefilled_tokens for one in ids]
        submits = len(r.link.submits())
        r.link.release()
        await r.settle()
        assert len(r.link.submits()) == submits + 1
        head = r.session(s).head
        assert r.session(s).mirror.kv_length == head.length + sum(counts)
        turn = await r.forced(s, [], "ok")
        assert turn.usage.cached_tokens == head.length + sum(counts)


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_a_turn_that_arrives_during_the_prefill_stops_it_and_uses_what_is_there(steps):
    async with rig(oracle={"num_blocks": 4096}) as r:
        s, ids = await awaiting(r)
        await stage(r, s, result(ids[1], LONG), result(ids[2], LONG))
        before, head = r.link.engine.stats().prefill_tokens, r.session(s).head
        r.link.hold = True
        answer = await stage(r, s, result(ids[0], "word " * 1500))
        assert answer.prefilled_tokens > 1500
        await r.steps(steps)
        handle = await r.start_forced(s, [], "ok")
        assert isinstance(r.link.sent[-1], Cancel)
        r.link.release()
        turn = await handle.result()
        usage = turn.usage
        assert turn.status == "completed"
        assert usage.cached_tokens == head.kv_length + 512 * steps
        assert usage.new_tokens == usage.input_tokens - head.kv_length
        assert usage.recomputed == []
        assert r.link.engine.stats().prefill_tokens - before == usage.new_tokens


async def test_a_turn_that_waits_for_the_prefill_can_be_cancelled_and_deleted():
    async with rig() as r:
        for end in ("cancel", "delete", "crash"):
            s, ids = await awaiting(r)
            before = await r.tokens(s)
            r.link.hold = True
            await stage(r, s, *(result(one, LONG) for one in ids))
            handle = await r.start(s, [])
            assert r.session(s).running.submitted is False
            if end == "crash":
                r.link.crash()
                turn = await handle.result()
                assert (turn.status, turn.error.code) == ("failed", EngineDown.code)
                assert await r.tokens(s) == before
                assert r.session(s).staged.keys() == set(ids)
                continue
            r.link.release()
            if end == "cancel":
                await r.call("cancel", s)
                assert await r.tokens(s) == before
                assert r.session(s).staged.keys() == set(ids)
                again = await r.forced(s, [], "ok")
                assert again.usage.recomputed == []
            else:
                await r.service.delete("local", s, keep_transcript=False)
            assert (await handle.result()).status == "cancelled"


async def test_cancel_delete_and_moves_of_the_head_discard_what_was_prefilled():
    async with rig() as r:
        s, ids = await awaiting(r)
        r.link.hold = True
        await stage(r, s, result(ids[0], LONG))
        await r.call("cancel", s)
        assert isinstance(r.link.sent[-1], Cancel)
        r.link.release()
        await r.settle()
        state = r.session(s)
        assert (state.head_id, state.staged.keys()) == ("t_1", {ids[0]})
        assert r.link.log(state) == state.mirror.tokens
        await stage(r, s, result(ids[1], LONG))
        await r.settle()
        await r.call("rollback", s, before="t_1")
        turn = await r.forced(s, "another way", "fine")
        assert turn.usage.recomputed == []
        assert turn.usage.new_tokens > 0
        other, ids = await awaiting(r)
        r.link.hold = True
        await stage(r, other, result(ids[0], LONG))
        await r.service.delete("local", other, keep_transcript=True)
        r.link.release()
        await r.settle()
        assert (await r.service.info("local", other)).kv.device == 0
        await r.service.delete("local", s, keep_transcript=False)
        assert r.link.engine.stats().blocks_locked == 0


async def test_what_is_computed_again_ahead_of_a_turn_is_told_by_that_turn():
    async with rig() as r:
        s, ids = await awaiting(r)
        head = r.session(s).head
        r.link.crash()
        await r.settle(10)
        r.link.start()
        await r.settle(10)
        await stage(r, s, result(ids[0], LONG))
        await r.settle()
        turn = await r.forced(s, [result(ids[1]), result(ids[2])], "ok")
        (again,) = turn.usage.recomputed
        assert (again.reason, again.tokens) == ("engine_restarted", head.kv_length)
        assert turn.usage.cached_tokens > head.length


async def test_results_of_a_running_turn_are_prefilled_when_it_has_ended():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        r.link.hold = True
        handle = await r.start_forced(s, "go", *THREE)
        while not r.session(s).running.sent_calls():
            await r.steps(1)
        (first, *_) = r.session(s).running.sent_calls()
        answer = await stage(r, s, result(first.call_id, LONG))
        assert answer.prefilled_tokens == 0
        r.link.release()
        turn = await handle.result()
        await r.settle()
        state = r.session(s)
        assert state.mirror.kv_length > state.head.length + 60
        rest = [result(one) for one in calls(turn)[1:]]
        done = await r.forced(s, rest, "ok")
        assert done.usage.recomputed == []
        assert done.usage.cached_tokens > state.tree.nodes[turn.id].length + 60


async def test_what_cannot_be_prefilled_ahead_is_only_staged():
    async with rig(oracle={"max_context": 1024}, max_open_turns=1) as r:
        s, ids = await awaiting(r)
        submits = len(r.link.submits())
        assert (await stage(r, s, result(ids[0], "word " * 2000))).prefilled_tokens == 0
        assert len(r.link.submits()) == submits
        busy, others = await awaiting(r)
        r.link.hold = True
        handle = await r.start(await r.create(), "hello")
        submits = len(r.link.submits())
        assert (await stage(r, busy, result(others[0], "short"))).prefilled_tokens == 0
        assert len(r.link.submits()) == submits
        r.link.release()
        await handle.result()
