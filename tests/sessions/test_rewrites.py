"""A template that rewrites the past: Qwen3's drops reasoning once another question was asked."""

from session_rig import TOOLS, calls, result, rig
from text_models import tokenizer

from agentserve import wire
from agentserve.sessions.prompt import conversation

THOUGHT = "<think>\nThe file is needed first, then I can say what is in it.\n</think>\n\n"


def render(r, s, *, generates=False):
    state = r.session(s)
    whole = conversation(state, state.tree.messages(state.head))
    return r.text.composer.tokens(whole, generates)


async def tool_loop(r, mode):
    """Run a loop in which the model thinks before its call and before its answer."""
    s = await r.create(tools=TOOLS, system="Be brief.", on_template_rewrite=mode)
    asked = await r.forced(s, "what is in it?", THOUGHT, ("read", {"q": "a"}))
    assert [type(item) for item in asked.output] == [wire.ReasoningOut, wire.ToolCallOut]
    told = await r.forced(s, [result(calls(asked)[0], "apples")], THOUGHT + "Apples.")
    assert told.usage.recomputed == []
    assert await r.tokens(s) == render(r, s)
    return s


async def test_recompute_renders_the_past_anew_and_says_what_that_cost():
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "recompute")
        before = await r.tokens(s)
        turn = await r.forced(s, "and how many?", THOUGHT + "Three.")
        (moved,) = turn.usage.recomputed
        assert moved.reason == "template_rewrite"
        usage = turn.usage
        assert usage.input_tokens == usage.cached_tokens + usage.new_tokens + moved.tokens
        after = await r.tokens(s)
        assert after == render(r, s)
        text = r.text.tokenizer.decode(after)
        assert text.count("<think>") == 1
        same = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        assert usage.cached_tokens == same
        assert r.link.log(r.session(s)).tolist() == after


async def test_keep_appends_and_recomputes_nothing():
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "keep")
        before = await r.tokens(s)
        head = r.session(s).head
        for number in range(1, 4):
            turn = await r.forced(s, "and how many?", THOUGHT + "Three.")
            usage = turn.usage
            assert usage.recomputed == []
            assert usage.cached_tokens == head.kv_length
            assert usage.new_tokens == usage.input_tokens - head.kv_length
            after = await r.tokens(s)
            assert after[: len(before)] == before
            assert r.text.tokenizer.decode(after).count("<think>") == 2 + number
            before, head = after, r.session(s).head


async def test_staged_results_are_prefilled_in_a_conversation_that_was_rewritten():
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "recompute")
        turn = await r.forced(
            s, "and how many?", THOUGHT, ("read", {"q": "b"}), ("read", {"q": "c"})
        )
        first, second = calls(turn)
        head = r.session(s).head
        answer = await r.call("tool_results", s, results=[result(first, "three " * 40)])
        await r.settle()
        done = await r.forced(s, [result(second, "four")], "Three.")
        assert done.usage.cached_tokens == head.length + answer.prefilled_tokens
        assert done.usage.recomputed == []
        assert await r.tokens(s) == render(r, s)
