"""Turns that are refused: with which error, and that they change nothing."""

import pytest
from session_rig import TOOLS, rig

from agentserve.config import ServerSettings
from agentserve.errors import (
    ContextFull,
    ExceedsKvCapacity,
    HeadMoved,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    StoreFull,
    ToolResultsMissing,
    TurnNotFound,
)
from agentserve.sessions.store import MemoryStore

ANSWER = {"type": "json_schema", "schema": {"type": "object"}}
NO_SCHEMAS = (
    {"type": {"type": "object"}},
    {"type": [[]]},
    {"properties": 5, "minProperties": 1},
    {"allOf": 5},
    {"oneOf": None},
    {"pattern": "(", "patternProperties": []},
    {"minimum": "1", "type": "integer"},
    {"multipleOf": {}, "type": "integer"},
)


async def test_unknown_tools_and_bad_parameters_are_refused():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        plain = await r.create()
        for body in (
            {"tools_allowed": ["search", "delete"]},
            {"tool_choice": {"name": "delete"}},
            {"tools_allowed": ["read"], "tool_choice": {"name": "search"}},
            {"sampling": {"logit_bias": {"999999": 1.0}}},
            {"sampling": {"logit_bias": {"-1": 1.0}}},
            {"response_format": {"type": "json_schema"}},
            *({"response_format": {**ANSWER, "schema": schema}} for schema in NO_SCHEMAS),
            {"response_format": ANSWER, "tool_choice": "required"},
            {"response_format": ANSWER, "tool_choice": {"name": "search"}},
            {"input": [{"type": "assistant", "content": "I said"}]},
        ):
            with pytest.raises(InvalidRequest):
                await r.turn(
                    s, **{"text": "x", **body} if "input" not in body else {"text": body["input"]}
                )
        with pytest.raises(InvalidRequest):
            await r.turn(plain, "x", tool_choice="required")
        with pytest.raises(ModelNotFound):
            await r.create(model="gpt-9")
        with pytest.raises(TurnNotFound):
            await r.service.turn("local", s, "t_9")


async def test_an_answer_of_a_format_that_looks_like_a_call_is_text_where_none_may_be_made():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        text = '{"name": "search", "arguments": {}}'
        turn = await r.forced(s, "go", text, response_format=ANSWER, tool_choice="none")
        assert [(item.text, turn.stop_reason) for item in turn.output] == [(text, "end")]
        turn = await r.forced(s, "go", text, response_format=ANSWER)
        assert ([item.name for item in turn.output], turn.stop_reason) == (["search"], "tool_calls")


async def test_force_is_refused_unless_the_server_allows_it():
    async with rig() as r:
        s = await r.create()
        r.service.driver.preparer._settings = ServerSettings()
        with pytest.raises(InvalidRequest, match="allow-force"):
            await r.forced(s, "a", "b")


async def test_an_invalid_request_leaves_no_trace():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        with pytest.raises(InvalidRequest):
            await r.start(s, [])
        assert (await r.service.info("local", s)).state == "idle"


async def test_expect_head_refuses_a_turn_on_an_older_head():
    async with rig() as r:
        s = await r.create()
        first = await r.turn(s, "a", expect_head=None)
        with pytest.raises(HeadMoved):
            await r.turn(s, "b", expect_head=None)
        second = await r.turn(s, "b", expect_head=first.id)
        assert second.previous == first.id
        with pytest.raises(HeadMoved):
            await r.turn(s, "c", expect_head=first.id)


async def test_a_user_message_while_calls_are_pending_is_refused_or_cancels_them():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        await r.forced(s, "go", ("read", {"q": "a"}), ("write", {"q": "b"}))
        before = await r.tokens(s)
        for text in ("never mind", []):
            with pytest.raises(ToolResultsMissing):
                await r.turn(s, text)
        assert await r.tokens(s) == before
        await r.turn(s, "never mind", on_pending="cancel")
        prompt = r.text.tokenizer.decode(await r.tokens(s))
        assert prompt.count("[cancelled: ") == 2
        assert (await r.service.info("local", s)).pending_calls == []


async def test_what_does_not_fit_the_context_is_refused_before_it_is_stored():
    async with rig(oracle={"max_context": 128}, reserve_output=16) as r:
        s = await r.create()
        with pytest.raises(ContextFull) as refused:
            await r.start(s, "word " * 200)
        details = refused.value.details
        assert details["limit"] == 112
        assert details["used"] == 0
        assert details["over"] == details["input"] + 1 - 112
        assert (await r.service.info("local", s)).turns == 0
        assert r.link.submits() == []


async def test_what_can_never_fit_the_kv_is_refused():
    async with rig(oracle={"num_blocks": 4}) as r:
        s = await r.create()
        with pytest.raises(ExceedsKvCapacity):
            await r.start(s, "word " * 100)


async def test_a_full_store_refuses_a_turn_and_changes_nothing():
    async with rig(store=MemoryStore(max_bytes=4000)) as r:
        s = await r.create()
        await r.turn(s, "a")
        tokens = await r.tokens(s)
        with pytest.raises(StoreFull):
            await r.start(s, "x" * 5000)
        assert await r.tokens(s) == tokens
        assert (await r.turn(s, "b")).status in ("completed", "incomplete")


async def test_too_many_open_turns_are_refused_as_overloaded():
    async with rig(max_open_turns=1) as r:
        one, two = await r.create(), await r.create()
        r.link.hold = True
        handle = await r.start(one, "a")
        with pytest.raises(Overloaded):
            await r.start(two, "b")
        r.link.release()
        await handle.result()
        await r.turn(two, "b")


async def test_a_refused_submit_leaves_the_engine_s_copy_as_it_was():
    async with rig(engine={"max_waiting": 1}) as r:
        s, other = await r.create(), await r.create()
        await r.turn(s, "hello")
        cached = r.session(s).head.kv_length
        r.link.hold = True
        await r.start(other)
        handle = await r.start(s, "go")
        r.link.release()
        refused = await handle.result()
        assert (refused.status, refused.error.code) == ("failed", "overloaded")
        turn = await r.turn(s, "go")
        assert (turn.usage.cached_tokens, turn.usage.recomputed) == (cached, [])
