"""A history that the template rewrites at the next question is computed before that comes."""

import asyncio
from array import array

import pytest
from session_rig import TOOLS, calls, result, rig
from text_models import tokenizer
from tiny_models import save_random

from agentserve.engine.messages import Cancel, Close
from agentserve.model.build import load_runner
from agentserve.sessions.conversation import Message
from agentserve.sessions.prepared import LEAST
from agentserve.sessions.prompt import Fed, compose, conversation
from agentserve.sessions.tree import common_prefix

THOUGHTS = {
    "qwen3": "<think>\nThe next file is needed.\n</think>\n\n",
    "glm4": "\n<think>The next file is needed.</think>\n",
    "smollm2": "",
}
LONG = "a line of the file " * 6


async def tool_loop(r, name, steps, **body):
    """Run a loop in which the model thinks at every step; return the idle session."""
    s = await r.create(**{"tools": TOOLS, "system": "Be brief.", **body})
    said = "what is in it?"
    for step in range(steps):
        turn = await r.forced(s, said, THOUGHTS[name], ("read", {"q": f"{step}"}))
        said = [result(calls(turn)[0], LONG)]
    await r.forced(s, said, THOUGHTS[name] + "Apples.")
    return s


def past_loop(steps):
    """Return the history of such a loop that another server ran."""
    items = [{"type": "user", "content": "what is in it?"}]
    for step in range(steps):
        call = {"type": "tool_call", "call_id": f"c{step}", "name": "read", "arguments": {"q": "x"}}
        thought = {"type": "reasoning", "text": "The next file is needed. " * 3}
        items.append({"type": "assistant", "content": [thought, call]})
        items.append(result(f"c{step}", LONG))
    return items


async def idle(r, seconds=10.0):
    """Let the session wait for its user for some seconds."""
    r.clock.advance(seconds)
    for _ in range(4):
        await r.service.sweep()
        await r.settle()


async def ask(r, s, name, text="and how many?"):
    return await r.forced(s, text, THOUGHTS[name] + "Three.")


def displaced(before, after):
    """Return the position from which on the template changed the log."""
    return common_prefix(array("i", before), array("i", after))


def backgrounds(r):
    return [submit for submit in r.link.submits() if submit.background]


def composed(r, s, text="and how many?"):
    """Return the prompt that a user message gives, with what it displaces."""
    fed = Fed((), (Message(role="user", text=text),))
    return compose(r.session(s), r.text, fed, generates=True)


def rendered(r, s):
    state = r.session(s)
    whole = conversation(state, state.tree.messages(state.head))
    return r.text.composer.tokens(whole, False)


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
async def test_after_a_loop_of_fifty_steps_nothing_is_recomputed_in_the_foreground(name):
    async with rig(tokenizer=tokenizer(name), oracle={"num_blocks": 640}) as r:
        s = await tool_loop(r, name, 50)
        cold, before = composed(r, s), await r.tokens(s)
        await idle(r)
        assert await r.tokens(s) == before
        (submit,) = backgrounds(r)
        assert submit.max_tokens == 0
        turn = await ask(r, s, name)
        after = await r.tokens(s)
        assert after == rendered(r, s)
        assert r.link.log(r.session(s)).tolist() == after
        assert r.session(s).head.kv_length >= len(after) - 1
        usage, (moved,) = turn.usage, cold.moved
        assert moved.tokens > len(before) // 3
        assert usage.recomputed == []
        assert usage.prepared_tokens == moved.tokens
        assert usage.cached_tokens == displaced(before, after) + moved.tokens
        assert usage.new_tokens == cold.new_tokens == usage.input_tokens - usage.cached_tokens
        assert r.service.stats().counters.prepared_tokens == usage.prepared_tokens
        assert (await r.service.info("local", s)).usage.prepared_tokens == usage.prepared_tokens
        await r.service.delete("local", s, keep_transcript=False)
        assert r.link.engine._sequences == {}


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
async def test_without_preparation_the_displaced_tail_is_recomputed(name):
    async with rig(tokenizer=tokenizer(name), prepared_prefills=0) as r:
        s = await tool_loop(r, name, 5)
        cold, before = composed(r, s), await r.tokens(s)
        await idle(r)
        usage = (await ask(r, s, name)).usage
        assert backgrounds(r) == []
        assert usage.recomputed == list(cold.moved) != []
        assert usage.cached_tokens == displaced(before, await r.tokens(s))
        assert usage.prepared_tokens == 0


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
async def test_a_real_model_answers_the_same_from_a_prepared_history(name, tmp_path):
    model = {"vocab_size": 20_032, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    save_random("qwen3", tmp_path, **model)
    answers = []
    for prefills in (2, 0):
        sizes = {"kv_bytes": 8 << 20, "host_bytes": 0}
        options = {"directory": str(tmp_path), "dtype": "float32", **sizes}
        settings = {"tokenizer": tokenizer(name), "runner": load_runner(options)}
        async with rig(**settings, prepared_prefills=prefills) as r:
            s = await r.create(tools=TOOLS, history=past_loop(8))
            await r.forced(s, [], THOUGHTS[name] + "Apples.")
            await idle(r)
            turn = await r.turn(s, "and how many?", sampling={"temperature": 0})
            answers.append(r.session(s).tree.log(r.session(s).head).tolist())
            assert bool(turn.usage.prepared_tokens) == bool(prefills) != bool(turn.usage.recomputed)
            assert turn.usage.output_tokens == 8
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "body", "steps"),
    [
        ("qwen3", {"on_template_rewrite": "keep"}, 3),
        ("glm4", {"on_template_rewrite": "keep"}, 3),
        ("qwen3", {}, 0),  # one short answer: less than is worth a prefill of its own
        ("smollm2", {}, 3),  # its template only appends
    ],
)
async def test_nothing_is_prepared_where_nothing_is_rewritten(name, body, steps):
    async with rig(tokenizer=tokenizer(name)) as r:
        s = await tool_loop(r, name, steps, **body)
        submits = len(r.link.submits())
        await idle(r)
        assert len(r.link.submits()) == submits
        usage = (await ask(r, s, name)).usage
        assert usage.prepared_tokens == 0
        assert sum(part.tokens for part in usage.recomputed) < LEAST


async def test_a_pending_call_is_not_followed_by_a_user():
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "qwen3", 3)
        turn = await r.forced(s, "again", THOUGHTS["qwen3"], ("read", {"q": "x"}))
        await idle(r)
        assert backgrounds(r) == []
        await r.forced(s, [result(calls(turn)[0], LONG)], THOUGHTS["qwen3"] + "Done.")
        await idle(r)
        assert len(backgrounds(r)) == 1


# The user's message and the preparation, in every order


async def test_a_message_before_the_preparation_is_computed_as_without_it():
    async with rig(tokenizer=tokenizer("glm4")) as r:
        s = await tool_loop(r, "glm4", 4)
        cold = composed(r, s)
        usage = (await ask(r, s, "glm4")).usage
        assert (usage.recomputed, usage.prepared_tokens) == (list(cold.moved), 0)
        assert backgrounds(r) == []
        assert r.session(s).prepared is None


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
async def test_a_message_during_the_preparation_uses_what_was_reached(steps):
    async with rig(tokenizer=tokenizer("qwen3"), engine={"token_budget": 64}) as r:
        s = await tool_loop(r, "qwen3", 4, system=LONG * 40)
        cold, before = composed(r, s), await r.tokens(s)
        r.link.hold = True
        await idle(r)
        await r.steps(steps)
        computed = r.session(s).prepared.computed
        assert (computed > 0) == (steps > 0)
        handle = await r.start_forced(s, "and how many?", "Three.")
        assert isinstance(r.link.sent[-1], Cancel) == (steps > 0)
        r.link.release()
        turn = await handle.result()
        after = await r.tokens(s)
        assert after == rendered(r, s)
        usage = turn.usage
        gained = usage.cached_tokens - displaced(before, after)
        assert usage.prepared_tokens == gained
        assert computed - 16 < gained <= computed
        assert sum(part.tokens for part in usage.recomputed) == cold.moved[0].tokens - gained
        assert usage.new_tokens == cold.new_tokens
        assert list(r.link.engine._sequences) == [r.session(s).mirror.sequence]


@pytest.mark.parametrize("end", ["cancel", "delete", "crash"])
async def test_a_turn_that_waits_for_the_preparation_can_be_ended(end):
    async with rig(tokenizer=tokenizer("qwen3"), engine={"token_budget": 64}) as r:
        s = await tool_loop(r, "qwen3", 4, system=LONG * 40)
        before = await r.tokens(s)
        r.link.hold = True
        await idle(r)
        await r.steps(1)
        handle = await r.start(s, "and how many?")
        assert r.session(s).running.submitted is False
        if end == "crash":
            r.link.crash()
        elif end == "cancel":
            task = asyncio.create_task(r.call("cancel", s))
        else:
            task = asyncio.create_task(r.service.delete("local", s, keep_transcript=False))
        await r.settle()
        r.link.release()
        turn = await handle.result()
        assert turn.status == ("failed" if end == "crash" else "cancelled")
        if end == "crash":
            r.link.start()
        else:
            await task
        if end == "delete":
            assert r.link.engine._sequences == {}
            return
        await r.settle()
        assert await r.tokens(s) == before
        assert r.session(s).prepared is None
        assert (await ask(r, s, "qwen3")).status == "completed"
        assert await r.tokens(s) == rendered(r, s)


async def test_preparation_stands_still_while_others_run():
    async with rig(tokenizer=tokenizer("qwen3"), engine={"token_budget": 64}) as r:
        s = await tool_loop(r, "qwen3", 4)
        other = await r.create()
        r.link.hold = True
        await idle(r)
        await r.steps(2)
        prepared = r.session(s).prepared
        done = prepared.computed
        handle = await r.start_forced(other, "me first", "Yes, of course. " * 9)
        await r.steps(4)
        assert r.session(other).running.started
        assert prepared.computed == done > 0
        r.link.release()
        await handle.result()
        await idle(r)
        assert prepared.mirror.kv_length == len(prepared.wanted)
        usage = (await ask(r, s, "qwen3")).usage
        assert usage.recomputed == []
        assert prepared.computed - 16 < usage.prepared_tokens <= prepared.computed


async def test_what_is_there_does_not_make_room_for_a_preparation():
    async with rig(tokenizer=tokenizer("qwen3"), oracle={"num_blocks": 52}) as r:
        s = await tool_loop(r, "qwen3", 5)
        (moved,), engine = composed(r, s).moved, r.link.engine
        cached = engine.stats().blocks_cached
        assert engine.stats().blocks_free < moved.tokens // 16
        await idle(r)
        assert len(backgrounds(r)) == 2  # a part of it, and no more room the second time
        assert engine.stats().evictions == 0
        assert engine.stats().blocks_cached >= cached
        usage = (await ask(r, s, "qwen3")).usage
        assert usage.prepared_tokens + usage.recomputed[0].tokens == moved.tokens


async def test_only_so_many_histories_are_prepared_at_a_time():
    async with rig(tokenizer=tokenizer("qwen3"), prepared_prefills=2) as r:
        sessions = [await tool_loop(r, "qwen3", 4, system=f"number {i}") for i in range(5)]
        r.link.hold = True
        await idle(r)
        assert len(backgrounds(r)) == 2
        r.link.release()
        await idle(r)
        assert len(backgrounds(r)) == 5
        for s in sessions:
            assert (await ask(r, s, "qwen3")).usage.recomputed == []


# Whatever else can happen to the session


@pytest.mark.parametrize("when", ["during", "after"])
async def test_a_restarted_engine_has_nothing_prepared(when):
    async with rig(tokenizer=tokenizer("glm4")) as r:
        s = await tool_loop(r, "glm4", 4)
        r.link.hold = when == "during"
        await idle(r)
        r.link.crash()
        await r.settle(10)
        r.link.start()
        r.link.release()
        await idle(r)
        usage = (await ask(r, s, "glm4")).usage
        assert (usage.cached_tokens, usage.prepared_tokens) == (0, 0)
        assert [part.reason for part in usage.recomputed] == [
            "template_rewrite",
            "engine_restarted",
        ]
        assert await r.tokens(s) == rendered(r, s)
        await idle(r)
        assert (await ask(r, s, "glm4", "and now?")).status == "completed"


@pytest.mark.parametrize("when", ["during", "after"])
@pytest.mark.parametrize("keep", [True, False])
async def test_a_session_that_ends_leaves_nothing_behind(when, keep):
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "qwen3", 4)
        state = r.session(s)
        r.link.hold = when == "during"
        await idle(r)
        assert state.prepared is not None
        await r.service.delete("local", s, keep_transcript=keep)
        r.link.release()
        await idle(r)
        assert r.link.engine._sequences == {}
        assert r.link.engine.stats().blocks_locked == 0
        assert len(r.service.driver._prepared) == 0


@pytest.mark.parametrize("when", ["during", "after"])
async def test_a_fork_goes_its_own_way(when):
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "qwen3", 4)
        r.link.hold = when == "during"
        await idle(r)
        (fork,) = (await r.call("fork", s)).sessions
        assert r.session(fork.id).prepared is None
        assert r.session(s).prepared is not None
        r.link.release()
        await idle(r)
        other = await r.forced(fork.id, "another question", "No.")
        turn = await ask(r, s, "qwen3")
        assert turn.usage.recomputed == []
        assert (turn.usage.prepared_tokens > 0, other.usage.prepared_tokens) == (True, 0)
        for one in (s, fork.id):
            assert await r.tokens(one) == rendered(r, one)
            assert r.link.log(r.session(one)).tolist() == await r.tokens(one)


MOVES = {
    "rollback": {"before": "t_3"},
    "history": {"items": [{"type": "user", "content": "something else"}]},
    "patch": {"tools": TOOLS[:1]},
    "cancel": {},
}


@pytest.mark.parametrize("when", ["during", "after"])
@pytest.mark.parametrize("move", MOVES)
async def test_moves_of_the_head_give_up_what_was_prepared(move, when):
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "qwen3", 4)
        r.link.hold = when == "during"
        await idle(r)
        prepared = r.session(s).prepared
        await r.call(move, s, **MOVES[move])
        assert r.session(s).prepared is None
        assert Close(prepared.mirror.sequence) in r.link.sent
        head = r.session(s).head_id
        r.link.release()
        await idle(r)
        assert r.session(s).head_id == head
        assert list(r.link.engine._sequences) == [r.session(s).mirror.sequence]
        said = [] if move == "history" else "another way"
        if r.session(s).pending():
            said = [result(call.call_id) for call in r.session(s).pending()]
        turn = await r.forced(s, said, "Fine.")
        assert (turn.status, turn.usage.prepared_tokens) == ("completed", 0)
        assert r.link.log(r.session(s)).tolist() == await r.tokens(s)


async def test_a_failed_turn_keeps_what_was_prepared_for_the_next_one():
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        s = await tool_loop(r, "qwen3", 4)
        before = await r.tokens(s)
        await idle(r)
        r.link.hold = True
        handle = await r.start(s, "stop this")
        await r.steps(1)
        task = asyncio.create_task(r.call("cancel", s))
        await r.settle()
        r.link.release()
        await task
        assert (await handle.result()).status == "cancelled"
        assert await r.tokens(s) == before
        assert (await ask(r, s, "qwen3")).usage.recomputed == []
