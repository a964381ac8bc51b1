"""Three calls, one failing, one slow, one cancelled: the prompt says whose result is whose."""

import family_templates
import pytest
from session_rig import TOOLS, result, rig

from agentserve import wire

NAMES = ("search", "read", "write")
ID_AFTER = {"mistral-list"}  # families whose results end with the id; else the sign comes first


def whose(family, text, said, signs):
    """Return the index of the sign (a name, an id) that is nearest to what a result said."""
    start = text.index(said)
    if family in ID_AFTER:
        return min(range(len(signs)), key=lambda i: text.find(signs[i], start) % len(text))
    return max(range(len(signs)), key=lambda i: text.rfind(signs[i], 0, start))


async def answered(r, s, pending):
    """Post the results out of order: the slow one last, with the cancelled one."""
    by_name = {call.name: call.call_id for call in pending}
    failed = result(by_name["read"], "no such file", status="error")
    await r.call("tool_results", s, results=[failed])
    cancelled = result(by_name["write"], "never mind", status="cancelled")
    slow = result(by_name["search"], "found it")
    return await r.forced(s, [cancelled, slow], "ok")


@pytest.mark.parametrize("name", family_templates.NAMES)
async def test_the_prompt_names_the_call_of_each_result(name):
    text = family_templates.text_of(name)
    async with rig(tokenizer=text.tokenizer, oracle={"stop_id": text.tokenizer.stop_ids[0]}) as r:
        calls = [{"type": "tool_call", "name": tool, "arguments": {"q": tool[0]}} for tool in NAMES]
        said = [{"type": "user", "content": "go"}, {"type": "assistant", "content": calls}]
        sessions = [await r.create(tools=TOOLS, history=said)]
        if not r.text.format.one_call:
            sessions.append(await r.create(tools=TOOLS))
            parts = [(tool, {"q": tool[0]}) for tool in NAMES]
            turn = await r.forced(sessions[1], "go", *parts, max_output_tokens=2000)
            assert [item.name for item in turn.output] == list(NAMES)
        for s in sessions:
            pending = r.session(s).pending()
            assert [call.name for call in pending] == list(NAMES)
            signs = list(NAMES)
            if text.composer.survival.names_results == "id":
                signs = [text.format.prompt_id(call.prompt_id, call.name) for call in pending]
            turn = await answered(r, s, pending)
            assert turn.status == "completed"
            tokens = await r.tokens(s)
            shown = text.tokenizer.decode(tokens)
            for owner, word in enumerate(("found it", "no such file", "never mind")):
                assert whose(name, shown, word, signs) == owner, (word, shown)


async def test_a_family_with_one_call_a_message_stops_after_the_first():
    for name in ("llama", "harmony"):
        text = family_templates.text_of(name)
        async with rig(tokenizer=text.tokenizer) as r:
            s = await r.create(tools=TOOLS)
            turn = await r.forced(s, "go", *((tool, {"q": "x"}) for tool in NAMES))
            assert [item.name for item in turn.output] == ["search"]
            turn = await r.forced(s, [result(turn.output[0].call_id)], ("read", {"q": "y"}))
            assert [item.name for item in turn.output] == ["read"]


@pytest.mark.parametrize("name", family_templates.NAMES)
async def test_a_call_that_cannot_be_read_takes_a_result_like_any_other(name):
    text = family_templates.text_of(name)
    async with rig(tokenizer=text.tokenizer) as r:
        s = await r.create(tools=TOOLS)
        whole = text.format.call("search", {"q": "QQ"})
        turn = await r.forced(s, "go", whole[: whole.index("QQ")])
        (item,) = turn.output
        assert isinstance(item, wire.MalformedToolCallOut)
        turn = await r.forced(s, [result(item.call_id, "not JSON", status="error")], "ok")
        assert "not JSON" in text.tokenizer.decode(await r.tokens(s))


async def test_reasoning_that_the_prompt_opens_is_not_opened_after_a_result():
    for name, opens in (("deepseek", (True, False)), ("qwen-coder", (True, True))):
        composer = family_templates.text_of(name).composer
        found = [composer.opens_reasoning({}, after_result=after) for after in (False, True)]
        assert tuple(found) == opens


async def test_ids_of_the_client_s_own_never_hide_a_call_s_name():
    text = family_templates.text_of("kimi")
    async with rig(tokenizer=text.tokenizer) as r:
        call = {"type": "tool_call", "name": "search", "arguments": {}, "call_id": "call_f00ba4"}
        said = [{"type": "user", "content": "go"}, {"type": "assistant", "content": [call]}]
        s = await r.create(tools=TOOLS, history=said)
        await r.forced(s, [result("call_f00ba4", "found")], "ok")
        shown = text.tokenizer.decode(await r.tokens(s))
        assert "f00ba4" not in shown
        assert shown.count("functions.search:") == 2  # the call, and whose result it is


async def test_reasoning_is_not_opened_either_after_a_result_that_was_only_prefilled():
    text = family_templates.text_of("deepseek")
    async with rig(tokenizer=text.tokenizer) as r:
        s = await r.create(tools=TOOLS)
        called = await r.forced(s, "go", "Hm.</think>", ("search", {"q": "x"}))
        call = called.output[-1]
        await r.turn(s, [result(call.call_id)], max_output_tokens=0)
        (item,) = (await r.forced(s, [], "Found.")).output
        assert isinstance(item, wire.TextOut)
