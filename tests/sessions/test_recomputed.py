"""Why tokens are computed again: each once, with the reason of its loss."""

import random
import re
from pathlib import Path

import msgspec
import pytest
from session_kv import crowded, hinted, waiting
from session_rig import ME, result, rig

from agentserve import wire
from agentserve.engine.messages import Finished, Progress, Started
from agentserve.server import routes
from agentserve.sessions.recomputed import REASONS, divide


def tampered(link, cached_less=0, **fields):
    """Let the next Started tell that much less cached, with other fields."""

    def edit(event):
        if not isinstance(event, Started):
            return event
        link.edit = None
        fewer = min(cached_less, event.cached)
        own = {"cached": event.cached - fewer, "computed": event.computed + fewer, **fields}
        names = ("turn", "queue_s")
        return Started(**{name: getattr(event, name) for name in names}, **own)

    link.edit = edit


def test_tokens_are_divided_among_causes_each_once():
    chance = random.Random(5)
    for _ in range(500):
        causes = [
            wire.Recomputed(chance.randint(-3, 9), chance.choice(REASONS[:4])) for _ in range(5)
        ]
        tokens = chance.randint(-2, 30)
        parts = divide(tokens, causes)
        assert len({part.reason for part in parts}) == len(parts)
        assert all(part.tokens > 0 for part in parts)
        causes_sum = sum(max(0, cause.tokens) for cause in causes)
        assert sum(part.tokens for part in parts) == max(0, min(tokens, causes_sum))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"lost": 40, "reason": "host_full"}, "host_full"),
        ({"lost": 40, "reason": "policy"}, "policy"),
        ({"lost": 40, "reason": "evicted"}, "evicted"),
        ({"lost": 40, "reason": "something new"}, "evicted"),
        ({}, "history_edited"),
    ],
)
async def test_every_token_that_the_engine_lost_has_the_engines_reason(told, reason):
    async with rig() as r:
        s = await r.create()
        await r.turn(s, "hello " * 40)
        tampered(r.link, cached_less=40, host=16, **told)
        turn = await r.turn(s, "and more")
        assert turn.usage.recomputed == [wire.Recomputed(40, reason)]
        assert turn.kv == wire.KvTokens(turn.usage.cached_tokens - 16, 16)
        computed = turn.usage.input_tokens - turn.usage.cached_tokens
        assert computed == turn.usage.new_tokens + 40
        info = await r.service.info(ME, s)
        assert info.usage.recomputed == [wire.Recomputed(40, reason)]
        assert r.service.stats().counters.recomputed == {reason: 40}
        assert reason in REASONS


async def test_what_the_client_dropped_has_that_as_its_reason_and_only_once():
    async with rig(oracle={"host_blocks": 64}) as r:
        s = await r.create()
        first = await r.turn(s, "hello " * 40)
        await hinted(r, s, kv="drop")
        assert (await r.service.info(ME, s)).kv == wire.KvTokens()
        turn = await r.turn(s)
        (dropped,) = turn.usage.recomputed
        assert dropped.reason == "dropped"
        assert dropped.tokens >= first.usage.input_tokens
        assert turn.usage.cached_tokens == 0
        assert (await r.turn(s)).usage.recomputed == []


async def test_what_was_dropped_has_its_reason_also_after_another_hint():
    async with rig(oracle={"host_blocks": 64}) as r:
        s = await r.create()
        await r.turn(s, "hello " * 40)
        await hinted(r, s, kv="drop")
        await hinted(r, s, expected_ms=1000)
        assert [part.reason for part in (await r.turn(s)).usage.recomputed] == ["dropped"]


async def test_loss_on_top_of_an_edited_history_is_told_apart():
    async with rig() as r:
        s = await r.create()
        for text in ("first " * 40, "second " * 40):
            await r.turn(s, text)
        answer = await r.call(
            "history", s, items=[{"type": "user", "content": "short"}, {"ref": "t_2"}]
        )
        (moved,) = answer.recomputed
        tampered(r.link, cached_less=3, lost=3, reason="evicted")
        turn = await r.turn(s, "go on")
        assert turn.usage.recomputed == [
            wire.Recomputed(3, "evicted"),
            wire.Recomputed(moved.tokens, "history_edited"),
        ]


async def test_what_a_prefill_ahead_computes_again_is_told_by_the_turn():
    async with rig() as r:
        s, (read, write) = await waiting(r)

        def edit(event):
            if isinstance(event, Started):
                names = ("turn", "cached", "computed", "queue_s")
                told = {name: getattr(event, name) for name in names}
                return Started(**told, lost=32, reason="host_full")
            if isinstance(event, Progress):
                return Progress(event.turn, event.done + 32, event.total + 32)
            if isinstance(event, Finished):
                return msgspec.structs.replace(event, recomputed=5)
            return event

        r.link.edit = edit
        await r.call("tool_results", s, results=[result(read, "x " * 50)])
        await r.settle()
        r.link.edit = None
        turn = await r.forced(s, [result(write)], "done")
        assert turn.usage.recomputed == [
            wire.Recomputed(32, "host_full"),
            wire.Recomputed(5, "preempted"),
        ]


async def test_the_head_moves_to_a_branch_that_the_engines_copy_left():
    async with rig(oracle={"num_blocks": 24}) as r:
        s = await r.create()
        await r.turn(s, "one")
        second = await r.turn(s, "two " * 60)
        await r.call("rollback", s, to="t_1")
        await r.turn(s, "three " * 60)
        other = await r.create()
        await r.turn(other, "another " * 200)  # takes the room of the branch that was left
        await r.call("rollback", s, to=second.id)
        turn = await r.turn(s, "and on")
        assert {part.reason for part in turn.usage.recomputed} == {"history_edited"}
        computed = turn.usage.input_tokens - turn.usage.cached_tokens
        again = sum(part.tokens for part in turn.usage.recomputed)
        assert again > 0
        assert computed == turn.usage.new_tokens + again


async def test_prefilling_what_is_there_already_computes_the_last_token():
    async with rig() as r:
        s = await r.create()
        await r.turn(s, "hello " * 20, max_output_tokens=0)
        turn = await r.turn(s, [], max_output_tokens=0)
        assert turn.usage.recomputed == [wire.Recomputed(1, "last_token")]
        assert turn.usage.new_tokens == 0


def test_every_reason_is_documented_and_no_other():
    text = (Path(routes.__file__).parent / "API.md").read_text()
    table = text.split("| reason |", 1)[1].split("\n\n", 1)[0]
    assert tuple(re.findall(r"^ *\| ([a-z_]+) \|", table, re.M)) == REASONS


@pytest.mark.parametrize(
    ("policy", "host_blocks", "reasons"),
    [
        ("none", 200, {"policy"}),
        ("device-lru", 200, {"evicted"}),
        ("lru+host", 200, set()),
        ("tool-aware", 200, set()),
        ("tool-aware", 4, {"host_full"}),
        ("tool-aware", 0, {"evicted"}),
    ],
)
async def test_every_recomputed_token_has_the_reason_of_its_loss(policy, host_blocks, reasons):
    oracle = {"num_blocks": 40, "host_blocks": host_blocks}
    async with rig(oracle=oracle, engine={"kv_policy": policy}) as r:
        names = await crowded(r)
        turns = [await r.turn(name, "and more") for name in names for _ in range(2)]
        found = {part.reason for turn in turns for part in turn.usage.recomputed}
        assert found == reasons
        for turn in turns:
            usage = turn.usage
            again = sum(part.tokens for part in usage.recomputed)
            assert usage.input_tokens - usage.cached_tokens == usage.new_tokens + again
        total = sum(part.tokens for turn in turns for part in turn.usage.recomputed)
        assert sum(r.service.stats().counters.recomputed.values()) == total
        assert sum(r.service.stats().engine.lost.values()) == total
