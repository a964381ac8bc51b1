"""Tool results: staged or fed, in any order, sealed by a failure, copied by a fork."""

import itertools

import pytest
from session_rig import TOOLS, calls, result, rig

from agentserve.errors import ResultConflict, ToolResultsMissing, UnknownCallId

THREE = (("read", {"q": "a"}), ("write", {"q": "b"}), ("search", {"q": "c"}))


async def loop_with_three_calls(r):
    s = await r.create(tools=TOOLS)
    return s, calls(await r.forced(s, "go", *THREE))


async def test_staged_and_fed_results_render_in_call_order_whatever_their_order():
    logs = []
    async with rig() as r:
        for order in itertools.permutations(range(3)):
            s, ids = await loop_with_three_calls(r)
            for number in order[:2]:
                await r.call("tool_results", s, results=[result(ids[number], f"out {number}")])
            await r.forced(s, [result(ids[order[2]], f"out {order[2]}")], "ok")
            logs.append(r.text.tokenizer.decode(await r.tokens(s)))
    assert len(set(logs)) == 1
    assert logs[0].index("out 0") < logs[0].index("out 1") < logs[0].index("out 2")


async def test_when_all_results_are_staged_an_empty_input_uses_them():
    async with rig() as r:
        s, ids = await loop_with_three_calls(r)
        answer = await r.call("tool_results", s, results=[result(i) for i in ids[1:]])
        assert [call.call_id for call in answer.pending_calls] == ids[:1]
        assert answer.staged == ids[1:]
        with pytest.raises(ToolResultsMissing):
            await r.turn(s, [])
        answer = await r.call("tool_results", s, results=[result(ids[0])])
        assert answer.pending_calls == []
        turn = await r.forced(s, [], "thanks")
        assert turn.status == "completed"
        assert r.session(s).staged == {}


async def test_the_same_result_twice_is_fine_and_another_conflicts():
    async with rig() as r:
        s, ids = await loop_with_three_calls(r)
        first = result(ids[0], {"n": 1})
        for _ in range(2):
            await r.call("tool_results", s, results=[first, first])
        with pytest.raises(ResultConflict):
            await r.call("tool_results", s, results=[result(ids[0], {"n": 2})])
        with pytest.raises(ResultConflict):
            await r.turn(s, [result(ids[0], "else"), result(ids[1]), result(ids[2])])
        with pytest.raises(ResultConflict):
            await r.call("tool_results", s, results=[result(ids[1], 1), result(ids[1], 2)])
        assert r.session(s).staged.keys() == {ids[0]}
        await r.forced(s, [first, result(ids[1]), result(ids[2])], "ok")
        again = await r.call("tool_results", s, results=[first])
        assert (again.staged, again.pending_calls) == ([], [])
        with pytest.raises(ResultConflict):
            await r.call("tool_results", s, results=[result(ids[0], "late change")])


async def test_results_of_unknown_calls_are_refused_and_nothing_is_staged():
    async with rig() as r:
        s, ids = await loop_with_three_calls(r)
        other, others = await loop_with_three_calls(r)
        for bad in ("call_nonsense", others[0]):
            with pytest.raises(UnknownCallId):
                await r.call("tool_results", s, results=[result(ids[0]), result(bad)])
            with pytest.raises(UnknownCallId):
                await r.turn(s, [result(bad)])
        assert r.session(s).staged == {}
        assert other != s


async def test_values_errors_and_cancellations_are_text_for_the_model():
    async with rig() as r:
        s, ids = await loop_with_three_calls(r)
        await r.forced(
            s,
            [
                result(ids[0], {"b": [1, "é"]}),
                result(ids[1], "No such file", status="error"),
                {"type": "tool_result", "call_id": ids[2], "status": "cancelled", "reason": "slow"},
            ],
            "ok",
        )
        prompt = r.text.tokenizer.decode(await r.tokens(s))
        assert '{"b":[1,"é"]}' in prompt
        assert "No such file" in prompt
        assert "[cancelled: slow]" in prompt


async def test_a_result_for_a_running_turn_seals_it_up_to_that_call():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        r.link.hold = True
        handle = await r.start_forced(s, "go", *THREE)
        while len(r.session(s).running.sent_calls()) < 2:
            await r.steps(1)
        first, second = (call.call_id for call in r.session(s).running.sent_calls())
        answer = await r.call("tool_results", s, results=[result(first, "early")])
        assert [call.call_id for call in answer.pending_calls] == [second]
        r.link.crash()
        turn = await handle.result()
        assert (turn.status, turn.stop_reason) == ("incomplete", "failed_after_calls")
        assert calls(turn) == [first]
        assert turn.pending_calls == []
        assert turn.error.code == "engine_down"
        r.link.hold = False
        r.link.start()
        await r.settle(10)
        assert r.session(s).staged.keys() == {first}
        done = await r.forced(s, [], "finished")
        assert done.status == "completed"
        assert {part.reason for part in done.usage.recomputed} == {"engine_restarted"}
        assert "early" in r.text.tokenizer.decode(await r.tokens(s))


async def test_a_cancelled_turn_drops_the_results_that_were_staged_for_it():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        r.link.hold = True
        handle = await r.start_forced(s, "go", *THREE)
        while not r.session(s).running.sent_calls():
            await r.steps(1)
        (first, *_) = r.session(s).running.sent_calls()
        await r.call("tool_results", s, results=[result(first.call_id)])
        r.link.release()
        turn = await r.call("cancel", s)
        assert turn.status == "cancelled"
        assert (await handle.result()) == turn
        assert r.session(s).staged == {}
        assert (await r.service.info("local", s)).head is None


async def test_a_fork_copies_staged_results_and_its_call_ids_stay_valid():
    async with rig() as r:
        s, ids = await loop_with_three_calls(r)
        await r.call("tool_results", s, results=[result(ids[0], "shared")])
        (fork,) = (await r.call("fork", s)).sessions
        for one in (s, fork.id):
            await r.forced(one, [result(ids[1]), result(ids[2])], "ok")
        assert await r.tokens(s) == await r.tokens(fork.id)
        assert "shared" in r.text.tokenizer.decode(await r.tokens(fork.id))


async def test_staged_results_survive_a_turn_that_was_refused():
    async with rig() as r:
        s, ids = await loop_with_three_calls(r)
        await r.call("tool_results", s, results=[result(ids[0])])
        with pytest.raises(ToolResultsMissing):
            await r.turn(s, [result(ids[1])])
        assert r.session(s).staged.keys() == {ids[0]}
