"""Worked examples of tools are of the prompt only."""

from session_rig import TOOLS, calls, result, rig

from agentserve import wire
from agentserve.sessions.examples import ANSWER

EXAMPLE = {"input": "Where is the Zurich file?", "arguments": {"q": "Zurich"}}
SEARCH = TOOLS[0] | {"examples": [EXAMPLE]}


async def test_examples_are_in_the_prompt_and_in_no_transcript():
    async with rig() as r:
        s = await r.create(tools=[SEARCH, *TOOLS[1:]])
        turn = await r.forced(s, "find it", ("search", {"q": "x"}))
        await r.forced(s, [result(calls(turn)[0])], "There.")
        prompt = r.text.tokenizer.decode(await r.tokens(s))
        assert prompt.count(ANSWER) == 3
        assert prompt.index("Zurich") < prompt.index("find it")
        for form in ("items", "openai", "anthropic"):
            transcript = wire.encode(await r.service.transcript("local", s, form)).decode()
            assert "find it" in transcript
            assert ANSWER not in transcript
            assert "Where is the Zurich file?" not in transcript


async def test_the_prompt_does_not_depend_on_what_a_turn_may_call():
    async with rig() as r:
        s = await r.create(tools=[SEARCH])
        for choice in ("auto", "none", "auto"):
            turn = await r.forced(s, "go", "Fine.", tool_choice=choice)
            assert turn.usage.recomputed == []
            computed = turn.usage.input_tokens - turn.usage.cached_tokens
            assert computed == turn.usage.new_tokens
        assert turn.usage.new_tokens < 20


async def test_changed_tools_have_their_own_examples():
    async with rig() as r:
        s = await r.create(tools=[SEARCH])
        await r.forced(s, "go", "Fine.")
        other = EXAMPLE | {"input": "Where is the Geneva file?"}
        await r.call("patch", s, tools=[SEARCH | {"examples": [other]}])
        await r.forced(s, "go on", "Fine.")
        prompt = r.text.tokenizer.decode(await r.tokens(s))
        assert "Where is the Geneva file?" in prompt
        assert "Where is the Zurich file?" not in prompt
        assert prompt.index("Geneva") < prompt.index("go") < prompt.index("go on")
