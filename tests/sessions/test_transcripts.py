"""What a session's history reads as, and that it can be imported again."""

import pytest
from session_rig import TOOLS, calls, result, rig

from agentserve import wire
from agentserve.errors import InvalidRequest


def foreign(output):
    """Return output items as the assistant item that would import them."""
    return wire.AssistantItem(
        [
            wire.Text(item.text)
            if isinstance(item, wire.TextOut)
            else wire.ToolCall(item.name, item.arguments, item.call_id)
            for item in output
        ]
    )


async def test_transcripts_in_every_format():
    async with rig() as r:
        s = await r.create(tools=TOOLS, system="Be brief.")
        turn = await r.forced(s, "look", "Sure.", ("search", {"q": "x"}))
        (call,) = calls(turn)
        await r.forced(s, [result(call, "found", status="error")], "It is there.")

        async def get(style):
            return await r.service.transcript("local", s, style)

        openai = await get("openai")
        assert [m["role"] for m in openai] == ["system", "user", "assistant", "tool", "assistant"]
        assert openai[2]["tool_calls"][0]["id"] == openai[3]["tool_call_id"] == call
        claude = await get("anthropic")
        assert claude["system"] == "Be brief."
        assert [m["role"] for m in claude["messages"]] == ["user", "assistant"] * 2
        assert claude["messages"][2]["content"][0]["is_error"] is True
        items = await get("items")
        assert [item["type"] for item in items] == [
            "system",
            "user",
            "text",
            "tool_call",
            "tool_result",
            "text",
        ]
        assert (await get("tokens"))["tokens"] == await r.tokens(s)
        with pytest.raises(InvalidRequest):
            await get("yaml")


async def test_an_exported_history_imports_to_the_same_text():
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        turn = await r.forced(s, "look", ("search", {"q": "x"}))
        await r.forced(s, [result(calls(turn)[0], "found")], "It is there.")
        state = r.session(s)
        items = []
        for entry in state.tree.entries(state.head):
            items += [*entry.fed, foreign(entry.output)]
        copy = await r.create(tools=TOOLS, history=items)
        decode = r.text.tokenizer.decode
        assert decode(await r.tokens(copy)).strip().startswith(decode(await r.tokens(s)).strip())
