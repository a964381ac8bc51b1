"""Moves of the head: history, rollback, fork, changed tools."""

import pytest
from session_rig import TOOLS, calls, result, rig

from agentserve import wire
from agentserve.errors import (
    BadToolSchema,
    ContextFull,
    HeadMoved,
    InvalidRequest,
    SessionBusy,
    SessionExists,
    TurnNotFound,
    UnknownCallId,
)

USER = {"type": "user", "content": "and now?"}


def recorded_chat(turns):
    """Return a recorded chat of `turns` exchanges, every third one with a tool call."""
    items = []
    for number in range(1, turns + 1):
        items.append({"type": "user", "content": f"question {number}"})
        if number % 3 == 0:
            call = {
                "type": "tool_call",
                "name": "search",
                "arguments": {"q": str(number)},
                "call_id": f"call_{number}",
            }
            items.append({"type": "assistant", "content": [call]})
            items.append(result(f"call_{number}", f"hit {number}"))
        items.append({"type": "assistant", "content": f"answer {number}"})
    return items


async def generated(r, count, **create):
    s = await r.create(**create)
    for number in range(count):
        await r.turn(s, f"message {number}")
    return s


async def kept_ids(r, s):
    """Return turn -> the token ids of its generated messages."""
    state = r.session(s)
    return {
        entry.turn: [message.ids for message in entry.messages if message.ids is not None]
        for entry in state.tree.entries(state.head)
    }


async def test_an_imported_chat_with_its_middle_replaced_keeps_the_last_five_turns():
    async with rig() as r:
        s = await r.create(tools=TOOLS, system="Be brief.", history=recorded_chat(40))
        listed = (await r.service.turns("local", s)).turns
        assert [turn.id for turn in listed] == [f"t_{n}" for n in range(1, len(listed) + 1)]
        for number in range(5):
            await r.turn(s, f"message {number}")
        turns = [turn.id for turn in (await r.service.turns("local", s)).turns]
        before = await kept_ids(r, s)
        old = await r.tokens(s)
        answer = await r.call(
            "history",
            s,
            items=[
                {"ref": f"{turns[0]}..{turns[1]}"},
                {"type": "user", "content": "Summary: many questions were answered."},
                {"ref": f"{turns[-5]}..{turns[-1]}"},
            ],
            expect_head=turns[-1],
        )
        after = await kept_ids(r, s)
        assert {turn: after[turn] for turn in turns[-5:]} == {
            turn: before[turn] for turn in turns[-5:]
        }
        log = await r.tokens(s)
        same = next(i for i, (a, b) in enumerate(zip(old, log, strict=False)) if a != b)
        assert answer.kept_tokens == same
        (moved,) = answer.recomputed
        assert moved.reason == "history_edited"
        turn = await r.turn(s, "go on", expect_head=answer.head)
        usage = turn.usage
        assert usage.cached_tokens == answer.kept_tokens
        assert usage.recomputed == [moved]
        assert usage.input_tokens == usage.cached_tokens + usage.new_tokens + moved.tokens
        assert usage.new_tokens < 60
        next_turn = await r.turn(s, "go on")
        assert next_turn.usage.recomputed == []


async def test_compaction_can_be_undone_and_kept_turns_named_again():
    async with rig() as r:
        s = await generated(r, 6)
        tokens = await r.tokens(s)
        answer = await r.call("history", s, items=[USER, {"ref": "t_5..t_6"}])
        summary, *kept = [turn.id for turn in (await r.service.turns("local", s)).turns]
        assert kept == ["t_5", "t_6"]
        again = await r.call("history", s, items=[{"ref": summary}, {"ref": "t_6"}])
        assert [turn.id for turn in (await r.service.turns("local", s)).turns] == [summary, "t_6"]
        await r.call("rollback", s, before=again.head)
        undone = await r.call("rollback", s, before=answer.head)
        assert undone.head == "t_6"
        assert await r.tokens(s) == tokens


async def test_a_history_that_is_the_same_moves_nothing():
    async with rig() as r:
        s = await generated(r, 4)
        tokens = await r.tokens(s)
        answer = await r.call("history", s, items=[{"ref": "t_1..t_4"}], prefill=False)
        assert await r.tokens(s) == tokens
        assert answer.kept_tokens == len(tokens)
        assert answer.recomputed == []
        turn = await r.turn(s, "next")
        assert turn.usage.recomputed == []
        assert turn.usage.cached_tokens == r.session(s).tree.nodes[answer.head].kv_length


async def test_pending_calls_that_stay_in_the_history_stay_pending():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        await r.forced(s, "hello", "hi")
        turn = await r.forced(s, "go", ("read", {"q": "a"}), ("write", {"q": "b"}))
        one, two = calls(turn)
        await r.call("tool_results", s, results=[result(one)])
        await r.call("history", s, items=[{"ref": turn.id}])
        assert [c.call_id for c in (await r.service.info("local", s)).pending_calls] == [two]
        await r.forced(s, [result(two)], "done")
        await r.call("history", s, items=[{"ref": "t_1"}])
        assert (await r.service.info("local", s)).pending_calls == []
        assert r.session(s).staged == {}


async def test_an_imported_history_may_end_with_pending_calls():
    async with rig() as r:
        call = {"type": "tool_call", "name": "read", "arguments": {}, "call_id": "toolu_1"}
        other = {"type": "tool_call", "name": "read", "arguments": {"q": "z"}}
        history = [USER, {"type": "assistant", "content": [call, other]}, result("toolu_1", "x")]
        s = await r.create(tools=TOOLS, history=history)
        (pending,) = (await r.service.info("local", s)).pending_calls
        assert pending.call_id.startswith("call_")
        turn = await r.forced(s, [result(pending.call_id)], "ok")
        assert turn.status == "completed"


async def test_histories_that_make_no_sense_are_refused_and_change_nothing():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        turn = await r.forced(s, "go", ("read", {"q": "a"}))
        await r.forced(s, [result(calls(turn)[0])], "ok")
        tokens, info = await r.tokens(s), await r.service.info("local", s)
        for items, error in (
            ([{"ref": "t_9"}], TurnNotFound),
            ([{"ref": "t_1..t_9"}], TurnNotFound),
            ([{"ref": "t_2..t_1"}], InvalidRequest),
            ([{"ref": "t_1"}, {"ref": "t_1"}], InvalidRequest),
            ([{"ref": "t_1"}, USER], InvalidRequest),
            ([result("call_x")], UnknownCallId),
            ([{"type": "user", "content": "word " * 9000}], ContextFull),
        ):
            with pytest.raises(error):
                await r.call("history", s, items=items)
        with pytest.raises(HeadMoved):
            await r.call("history", s, items=[], expect_head="t_1")
        assert await r.tokens(s) == tokens
        assert await r.service.info("local", s) == info


async def test_an_empty_history_is_a_fresh_start():
    async with rig() as r:
        s, twin = await generated(r, 2), await r.create()
        await r.call("history", s, items=[])
        await r.turn(s, "anew")
        await r.turn(twin, "anew")
        assert await r.tokens(s) == await r.tokens(twin)


async def test_rollback_moves_to_a_turn_before_a_turn_and_before_the_first():
    async with rig() as r:
        s = await r.create()
        logs = {None: []}
        for number in range(4):
            turn = await r.turn(s, f"message {number}")
            logs[turn.id] = await r.tokens(s)
        for move, head in (
            ({"to": "t_3"}, "t_3"),
            ({"before": "t_3"}, "t_2"),
            ({"to": "t_4"}, "t_4"),
            ({"before": "t_1"}, None),
            ({"to": "t_2"}, "t_2"),
        ):
            answer = await r.call("rollback", s, **move)
            assert answer.head == head
            assert await r.tokens(s) == logs[head]
        again = await r.turn(s, "message 2")
        assert again.usage.cached_tokens >= len(logs["t_2"]) - 1
        assert await r.tokens(s) == logs["t_3"]
        assert (await r.service.turn("local", s, "t_4")).id == "t_4"
        for bad in ({}, {"to": "t_1", "before": "t_2"}):
            with pytest.raises(InvalidRequest):
                await r.call("rollback", s, **bad)
        with pytest.raises(TurnNotFound):
            await r.call("rollback", s, to="t_77")


async def test_rollback_inside_an_imported_history():
    async with rig() as r:
        s = await r.create(tools=TOOLS, history=recorded_chat(6))
        await r.turn(s, "message")
        await r.call("rollback", s, to="t_2")
        twin = await r.create(tools=TOOLS, history=recorded_chat(2))
        assert await r.tokens(s) == await r.tokens(twin)
        first, second = await r.turn(s, "next"), await r.turn(twin, "next")
        assert [i.text for i in first.output] == [i.text for i in second.output]


async def test_nothing_moves_while_a_turn_runs():
    async with rig() as r:
        s = await generated(r, 2)
        r.link.hold = True
        handle = await r.start(s, "go")
        for method, body in (
            ("history", {"items": []}),
            ("rollback", {"to": "t_1"}),
            ("patch", {"tools": TOOLS}),
        ):
            with pytest.raises(SessionBusy):
                await r.call(method, s, **body)
        r.link.release()
        await handle.result()


async def test_forks_share_kv_and_go_on_alone():
    async with rig() as r:
        s = await generated(r, 3, system="Be brief.")
        parent = r.session(s)
        info = await r.call("fork", s, n=3)
        ids = [one.id for one in info.sessions]
        for one in ids:
            turn = await r.turn(one, "what next?")
            assert turn.usage.cached_tokens >= parent.head.kv_length
            assert turn.usage.recomputed == []
        await r.turn(s, "what next?")
        logs = [await r.tokens(one) for one in (s, *ids)]
        assert all(log == logs[0] for log in logs)
        (named,) = (await r.call("fork", s, at="t_2", id="branch")).sessions
        assert (named.id, named.head, named.turns) == ("branch", "t_2", 2)
        with pytest.raises(SessionExists):
            await r.call("fork", s, id="branch")
        with pytest.raises(InvalidRequest):
            await r.call("fork", s, id="two", n=2)
        with pytest.raises(TurnNotFound):
            await r.call("fork", s, at="t_66")


async def test_a_fork_s_next_turn_computes_its_new_tokens_and_copies_one_block():
    async with rig() as r:
        s = await generated(r, 3, system="Be brief. " * 20)
        head, engine = r.session(s).head, r.link.engine
        assert head.kv_length % 16
        shared = head.kv_length // 16
        alone = engine.stats()
        (fork,) = (await r.call("fork", s)).sessions
        turn = await r.turn(fork.id, "what next?", max_output_tokens=0)
        after = engine.stats()
        assert turn.usage.cached_tokens == head.kv_length
        computed = after.prefill_tokens - alone.prefill_tokens
        assert computed == turn.usage.new_tokens == turn.usage.input_tokens - head.kv_length
        blocks = -(-turn.usage.input_tokens // 16)
        assert alone.blocks_free - after.blocks_free == blocks - shared


async def test_a_fork_of_a_running_session_takes_the_committed_head():
    async with rig() as r:
        s = await generated(r, 2)
        log = await r.tokens(s)
        r.link.hold = True
        handle = await r.start(s, "go", max_output_tokens=30)
        await r.steps(3)
        (fork,) = (await r.call("fork", s)).sessions
        assert fork.head == "t_2"
        assert await r.tokens(fork.id) == log
        r.link.release()
        await handle.result()
        await r.turn(fork.id, "go", max_output_tokens=30)
        assert await r.tokens(fork.id) == await r.tokens(s)


async def test_a_fork_may_be_limited_to_some_tools_without_another_prompt():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        await r.forced(s, "hello", "hi")
        (fork,) = (await r.call("fork", s, tools_allowed=["read"])).sessions
        turn = await r.turn(fork.id, "go")
        assert turn.usage.recomputed == []
        assert '"read' in r.link.submits()[-1].grammar.replace("\\", "")
        assert '"write' not in r.link.submits()[-1].grammar.replace("\\", "")
        with pytest.raises(InvalidRequest):
            await r.call("fork", s, tools_allowed=["rm"])


async def test_changed_tools_say_what_they_cost_and_the_next_turn_pays_that():
    async with rig() as r:
        s = await generated(r, 3, tools=TOOLS)
        head = r.session(s).head_id
        answer = await r.call("patch", s, tools=TOOLS[:1], metadata={"a": 1}, ttl_ms=5000)
        assert answer.head == head
        (moved,) = answer.recomputed
        assert moved.reason == "tools_changed"
        turn = await r.turn(s, "go")
        assert turn.usage.recomputed[0].reason == "tools_changed"
        assert turn.usage.input_tokens - turn.usage.cached_tokens == turn.usage.new_tokens + sum(
            part.tokens for part in turn.usage.recomputed
        )
        info = await r.service.info("local", s)
        assert info.metadata == {"a": 1}
        await r.call("rollback", s, to="t_1")
        assert "write" not in r.text.tokenizer.decode(await r.tokens(s))
        await r.turn(s, "go")


async def test_bad_tools_are_refused():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        with pytest.raises(InvalidRequest):
            await r.call("patch", s, tools=[TOOLS[0], TOOLS[0]])
        with pytest.raises(BadToolSchema):
            await r.create(tools=[{**TOOLS[0], "parameters": {"type": "array"}}])
        assert len(r.session(s).profile.tools) == 3


async def test_kept_turns_answer_as_they_did():
    async with rig() as r:
        s = await r.create()
        first = await r.turn(s, "a")
        second = await r.turn(s, "b")
        await r.call("history", s, items=[USER, {"ref": "t_2"}])
        assert await r.service.turn("local", s, "t_2") == second
        assert await r.service.turn("local", s, "t_1") == first
        summary = (await r.service.turns("local", s)).turns[0]
        assert isinstance(summary, wire.Turn)
        assert summary.output == []
