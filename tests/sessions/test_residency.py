"""Waits, promotions, where KV is, and why tokens are computed again: the server's side of it."""

import asyncio
import contextlib
import random
import re
from pathlib import Path

import msgspec
import pytest
from session_rig import ME, TOOLS, calls, result, rig

from agentserve import wire
from agentserve.engine.messages import (
    Finished,
    Hint,
    Inspect,
    Inspected,
    Progress,
    Promote,
    Residency,
    Started,
)
from agentserve.errors import InvalidRequest, SessionNotFound
from agentserve.server import routes
from agentserve.server.idempotency import AnswerLedger
from agentserve.server.metrics import Metrics
from agentserve.sessions import residency
from agentserve.sessions.recomputed import REASONS, divide
from agentserve.sessions.toolkeys import MAX_KEY, tool_key
from agentserve.sessions.waits import LEAD_S, MAX_LEAD_S

TWO = (("read", {"q": "a"}), ("write", {"command": "cd /src && make -j4", "q": "b"}))
TIMED = [
    tool | {"expected_ms": expected} if expected else tool
    for tool, expected in zip(TOOLS, (None, 2_000, 30_000), strict=True)
]


async def waiting(r, tools=TIMED, **fields):
    """Return a session that waits for two calls, and their ids."""
    s = await r.create(tools=tools)
    return s, calls(await r.forced(s, "go", *TWO, **fields))


def hint(r):
    return [command for command in r.link.sent if isinstance(command, Hint)][-1]


def promotions(r):
    return [command.begin for command in r.link.sent if isinstance(command, Promote)]


async def hinted(r, s, **hints):
    await r.service.hints(ME, s, wire.Hints(**hints))


# Keys


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({}, "run"),
        ({"q": "make"}, "run"),
        ({"command": "ls -la /tmp"}, "run:ls"),
        ({"command": "/usr/bin/Python3 x.py"}, "run:python3"),
        ({"cmd": "cd /src && CC=gcc sudo make -j4 | tail"}, "run:make"),
        ({"command": "cd /src"}, "run:cd"),
        ({"argv": ["pytest", "-q"]}, "run:pytest"),
        ({"command": ["bash", "-lc", "x"]}, "run:bash"),
        ({"command": "  \n\n  git status"}, "run:git"),
        ({"command": ""}, "run"),
        ({"command": 7}, "run"),
        ({"command": []}, "run"),
        ({"command": [3, None]}, "run"),
        ({"where": "https://Example.org:8080/a?b=secret"}, "run:example.org"),
        ({"url": "HTTP://[::1]/"}, "run:1"),
        ({"url": "http://["}, "run"),
        ({"url": "ftp://x"}, "run"),
        ({"command": "", "url": "http://a.b/c"}, "run:a.b"),
    ],
)
def test_a_key_names_the_tool_and_the_program_or_host(arguments, key):
    assert tool_key("Run", arguments) == key


def test_a_key_is_short_and_plain_whatever_the_arguments_are():
    chance = random.Random(3)
    for _ in range(300):
        text = "".join(chr(chance.choice([*range(1, 128), 0x3B1, 0x1F600])) for _ in range(200))
        for arguments in ({"command": text}, {"u": "http://" + text}, {"argv": [text]}):
            key = tool_key("t" * 64, arguments)
            assert len(key) <= MAX_KEY
            assert all(char.isascii() and char.isprintable() and char != " " for char in key)


# Waits


async def test_a_turn_that_ends_in_calls_says_what_is_waited_for_and_how_long_that_takes():
    async with rig() as r:
        await waiting(r)
        assert (hint(r).tools, hint(r).expected_s, hint(r).kv) == (
            ["read", "write:make"],
            30,
            "auto",
        )
        await waiting(r, tools=TOOLS)
        assert (hint(r).tools, hint(r).expected_s) == (["read", "write:make"], None)


async def test_equal_calls_are_one_key_and_a_turn_that_answers_waits_for_a_person():
    async with rig() as r:
        s = await r.create(tools=TIMED)
        turn = await r.forced(s, "go", ("read", {"q": "a"}), ("read", {"q": "b"}))
        assert (hint(r).tools, hint(r).expected_s) == (["read"], 2)
        await r.forced(s, [result(one) for one in calls(turn)], "done")
        assert (hint(r).tools, hint(r).expected_s) == ([], None)
        assert hint(r).sequence == r.session(s).mirror.sequence


async def test_the_clients_word_goes_before_the_declaration_and_is_used_up_by_the_turn():
    async with rig() as r:
        s, (read, write) = await waiting(r)
        for hints, expected in [
            ({"expected_ms": 500}, 0.5),
            ({"expected_ms": {write: 1_000}}, 2.0),  # of the other the declaration holds
            ({"expected_ms": {write: 1_000, read: 7_000}}, 7.0),
            ({"expected_ms": {"call_of_another_turn": 90_000}}, 30.0),
            ({"expected_ms": 500, "resume_in_ms": 4_000}, 4.0),
            ({}, 30.0),
        ]:
            await hinted(r, s, **hints)
            assert hint(r).expected_s == expected, hints
        await hinted(r, s, expected_ms=500, kv="device")
        turn = await r.forced(s, [result(read), result(write)], ("read", {"q": "c"}))
        assert (hint(r).tools, hint(r).expected_s, hint(r).kv) == (["read"], 2, "auto")
        assert turn.status == "completed"


async def test_hints_of_a_turn_and_hints_while_it_runs_are_of_the_wait_after_it():
    async with rig() as r:
        s = await r.create(tools=TIMED)
        before = len(r.link.sent)
        r.link.hold = True
        handle = await r.start_forced(s, "go", *TWO, hints={"expected_ms": 9_000, "kv": "host"})
        r.clock.advance(5)
        assert not [command for command in r.link.sent[before:] if isinstance(command, Hint)]
        r.link.release()
        await handle.result()
        await r.settle()
        assert (hint(r).expected_s, hint(r).kv) == (9.0, "host")
        r.link.hold = True
        ids = calls(await handle.result())
        handle = await r.start_forced(s, [result(one) for one in ids], "done")
        await hinted(r, s, resume_in_ms=60_000)
        r.clock.advance(5)
        r.link.release()
        await handle.result()
        await r.settle()
        assert (hint(r).tools, hint(r).expected_s) == ([], 60.0)


@pytest.mark.parametrize(("said", "told"), [("disk", "host"), ("drop", "drop"), ("auto", "auto")])
async def test_where_the_client_wants_the_kv_is_told(said, told):
    async with rig() as r:
        s, _ = await waiting(r)
        await hinted(r, s, kv=said)
        assert hint(r).kv == told


async def test_staged_results_shorten_the_wait_and_the_last_one_announces_the_turn():
    async with rig() as r:
        s, (read, write) = await waiting(r)
        r.clock.advance(12)
        await r.call("tool_results", s, results=[result(read)])
        assert (hint(r).tools, hint(r).expected_s) == (["write:make"], 18)
        await r.settle()
        assert (hint(r).tools, hint(r).expected_s) == (["write:make"], 18)
        assert promotions(r) == []  # the prefill ahead brings the KV back
        other, (read, write) = await waiting(r)
        await r.call("tool_results", other, results=[result(write)])
        assert (hint(r).tools, hint(r).expected_s) == (["read"], 2)
        assert promotions(r) == []
        r.service.driver.draining = True  # nothing is prefilled ahead
        await r.call("tool_results", other, results=[result(read)])
        assert (hint(r).expected_s, promotions(r)) == (0.0, [True])
        await r.call("tool_results", other, results=[result(read)])
        assert promotions(r) == [True]


async def test_moves_of_the_head_and_forks_begin_a_wait_of_their_own():
    async with rig() as r:
        s, _ = await waiting(r)
        (fork,) = (await r.call("fork", s)).sessions
        assert hint(r).sequence == r.session(fork.id).mirror.sequence
        assert hint(r).tools == ["read", "write:make"]
        await r.call("rollback", s, before="t_1")
        assert (hint(r).sequence, hint(r).tools) == (r.session(s).mirror.sequence, [])


# Promotion


async def test_a_promised_turn_is_prepared_for_shortly_before():
    async with rig() as r:
        s, _ = await waiting(r)
        await hinted(r, s, resume_in_ms=20_000)
        r.clock.advance(20 - MAX_LEAD_S - 0.1)
        await r.service.sweep()
        assert promotions(r) == []
        r.clock.advance(MAX_LEAD_S - LEAD_S + 0.1)
        await r.service.sweep()
        await r.service.sweep()
        assert promotions(r) == [True]
        await hinted(r, s, resume_in_ms=90_000)  # it was wrong: nothing is brought back now
        assert promotions(r) == [True, False]
        r.clock.advance(60)
        await r.service.sweep()
        assert promotions(r) == [True, False]


async def test_a_promise_is_void_when_a_turn_other_hints_or_the_end_of_the_session_come_first():
    async with rig() as r:
        for end in ("turn", "hints", "delete", "crash"):
            s, ids = await waiting(r)
            await hinted(r, s, resume_in_ms=1_000)
            if end == "turn":
                await r.forced(s, [result(one) for one in ids], "done")
            elif end == "hints":
                await hinted(r, s)
            elif end == "delete":
                await r.service.delete(ME, s, keep_transcript=False)
            else:
                r.link.crash()
                await r.settle(10)
                r.session(s).mirror.sync(r.service.driver.incarnation)
            r.clock.advance(2)
            await r.service.sweep()
            assert promotions(r) == [], end
            assert not r.service.driver.waits._promised


async def test_a_promise_that_is_nearly_due_is_kept_at_once():
    async with rig() as r:
        s, _ = await waiting(r)
        await hinted(r, s, resume_in_ms=0)
        await r.service.sweep()
        assert promotions(r) == [True]


async def test_a_request_announces_its_turn_and_takes_that_back_when_it_fails():
    async with rig() as r:
        s, ids = await waiting(r)
        with r.service.turn_announced(ME, s):
            assert promotions(r) == [True]
            await r.forced(s, [result(one) for one in ids], "done")
        assert promotions(r) == [True]
        with pytest.raises(InvalidRequest), r.service.turn_announced(ME, s):
            raise InvalidRequest("no")
        assert promotions(r) == [True, True, False]
        with pytest.raises(asyncio.CancelledError), r.service.turn_announced(ME, s):
            raise asyncio.CancelledError
        assert promotions(r) == [True, True, False, True, False]


async def test_two_requests_at_once_are_one_announcement():
    async with rig() as r:
        s, _ = await waiting(r)
        with r.service.turn_announced(ME, s):
            with contextlib.suppress(InvalidRequest), r.service.turn_announced(ME, s):
                raise InvalidRequest("no")
            assert promotions(r) == [True]


async def test_nothing_is_promoted_where_no_turn_would_be_taken():
    async with rig(max_open_turns=1) as r:
        s, _ = await waiting(r)
        empty = await r.create()
        with r.service.turn_announced("somebody", s), r.service.turn_announced(ME, "nobody"):
            pass
        with r.service.turn_announced(ME, empty):
            pass
        r.link.hold = True
        busy = await r.create()
        handle = await r.start(busy)
        with r.service.turn_announced(ME, s), r.service.turn_announced(ME, busy):
            pass
        assert promotions(r) == []
        r.link.release()
        await handle.result()


# Why tokens are computed again


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


@pytest.mark.parametrize("kv", ["drop", "host"])
async def test_staged_results_do_not_send_the_kv_away_again(kv):
    async with rig(oracle={"host_blocks": 64}) as r:
        s, (read, write) = await waiting(r)
        await hinted(r, s, kv=kv)
        before = len(r.link.sent)
        for call in (read, write):
            await r.call("tool_results", s, results=[result(call)])
            await r.settle()
        later = [command.kv for command in r.link.sent[before:] if isinstance(command, Hint)]
        assert later
        assert set(later) == {"auto"}


def test_hints_name_a_bounded_number_of_calls():
    many = {"expected_ms": {f"call_{number}": 1 for number in range(1025)}}
    with pytest.raises(msgspec.ValidationError, match="expected_ms"):
        msgspec.convert(many, wire.Hints)


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


# Where the KV is


class Told:
    """Answers Inspect as it is told to, in place of the engine."""

    def __init__(self, r):
        self.where, self.asked, self.silent = {}, [], False
        self._driver, self._send = r.service.driver, r.link.send
        r.link.send = self.send

    def send(self, command):
        if not isinstance(command, Inspect):
            self._send(command)
            return
        self.asked.append(command)
        if not self.silent:
            known = [self.where[one] for one in command.sequences if one in self.where]
            answer = Inspected(command.number, known)
            asyncio.get_running_loop().call_soon(self._driver.board.on_inspected, answer)


async def test_a_session_shows_where_its_kv_is_and_what_was_moved():
    async with rig() as r:
        told, s = Told(r), await r.create()
        assert (await r.service.info(ME, s)).kv == wire.KvTokens()
        assert told.asked == []  # there is nothing to ask about
        await r.turn(s, "hello " * 40)
        sequence = r.session(s).mirror.sequence
        told.where[sequence] = Residency(sequence, 60, 16, 48, 4096, 1024, 0.25)
        info = await r.service.info(ME, s)
        assert info.kv == wire.KvTokens(device=16, host=48)
        assert info.residency == wire.Residency(4096, 1024, 250)
        del told.where[sequence]
        assert (await r.service.info(ME, s)).kv == wire.KvTokens()


async def test_an_engine_that_does_not_answer_leaves_the_last_answer(monkeypatch):
    async with rig() as r:
        told, s = Told(r), await r.create()
        await r.turn(s)
        sequence = r.session(s).mirror.sequence
        told.where[sequence] = Residency(sequence, 60, 0, 48, 4096, 0, 0.0)
        assert (await r.service.info(ME, s)).kv.host == 48
        monkeypatch.setattr(residency, "ANSWER_S", 0.01)
        told.silent = True
        assert (await r.service.info(ME, s)).kv.host == 48
        assert not r.service.driver.board._asked
        r.service.driver.board.on_inspected(Inspected(told.asked[-1].number, []))  # too late
        assert (await r.service.info(ME, s)).kv.host == 48
        r.link.crash()
        await r.settle(10)
        assert (await r.service.info(ME, s)).kv == wire.KvTokens()


async def test_sessions_are_found_by_tier_with_one_question():
    async with rig() as r:
        told = Told(r)
        names = [await r.create(id=name) for name in ("a", "b", "c", "d")]
        for name in names[:3]:
            await r.turn(name)
        for name, device, host in (("a", 16, 0), ("b", 16, 32), ("c", 0, 32)):
            sequence = r.session(name).mirror.sequence
            told.where[sequence] = Residency(sequence, 40, device, host, 0, 0, 0.0)
        for tier, expected in (
            ("device", ["a", "b"]),
            ("host", ["b", "c"]),
            ("disk", []),
            ("none", ["d"]),
            (None, names),
        ):
            asked = len(told.asked)
            found = await r.service.list(ME, tier=tier)
            assert [info.id for info in found.sessions] == expected, tier
            assert len(told.asked) == asked + 1
        page = await r.service.list(ME, limit=1)
        assert (len(page.sessions), page.next, len(told.asked[-1].sequences)) == (1, "a", 1)
        with pytest.raises(SessionNotFound):
            await r.service.info("somebody", "a")


# Times


@pytest.mark.parametrize(
    ("prefill", "decode", "restore", "told"),
    [
        (1.5, 2.0, 0.5, (500, 1000, 2000)),
        (1.5, 2.0, 1.75, (1750, 0, 1750)),
        (1, 2, 0, (0, 1000, 2000)),
    ],
)
async def test_the_wait_for_copies_is_no_prefill_and_no_decode(prefill, decode, restore, told):
    async with rig() as r:

        def edit(event):
            if not isinstance(event, Finished):
                return event
            times = {"prefill_s": prefill, "decode_s": decode, "restore_s": restore}
            return msgspec.structs.replace(event, **times)

        r.link.edit = edit
        timing = (await r.turn(await r.create())).timing_ms
        assert (timing.restore, timing.prefill, timing.decode) == told
        assert sum(told) == 1000 * (prefill + decode)


# The real engine with two tiers

SMALL = {"num_blocks": 40, "host_blocks": 200}  # device KV for about one of these sessions


async def crowded(r, count=3):
    """Return sessions that have each had a turn of more than half the device KV."""
    names = [await r.create(tools=TOOLS) for _ in range(count)]
    for name in names:
        await r.turn(name, f"{name} " + "word " * 350)
        await r.settle(400)
    return names


async def test_kv_that_left_the_device_comes_back_and_is_seen_on_its_way():
    async with rig(oracle=SMALL) as r:
        names = await crowded(r)
        before = await r.service.info(ME, names[0])
        assert before.kv.host > 300
        assert before.kv.device < before.kv.host
        assert before.residency.saved_bytes > 0
        assert before.residency.loaded_bytes == 0
        found = await r.service.list(ME, tier="host")
        assert names[0] in [info.id for info in found.sessions]
        turn = await r.turn(names[0], "and more")
        assert turn.kv.host > 0
        assert turn.kv.host + turn.kv.device == turn.usage.cached_tokens
        assert turn.usage.recomputed == []
        after = await r.service.info(ME, names[0])
        assert after.residency.loaded_bytes > 0
        assert after.kv.device > 300
        stats = r.service.stats().engine
        assert stats.loaded_bytes == after.residency.loaded_bytes
        metrics = Metrics(r.service, AnswerLedger(r.clock))
        metrics.observe_turn(await r.turn(names[0]))  # it was there already
        assert b"agentserve_restore_seconds_count 0.0" in metrics.render()
        metrics.observe_turn(turn)
        assert b"agentserve_restore_seconds_count 1.0" in metrics.render()


async def test_an_announced_turn_finds_its_kv_on_the_device():
    async with rig(oracle=SMALL) as r:
        names = await crowded(r)
        with r.service.turn_announced(ME, names[0]):
            await r.settle(400)
            assert (await r.service.info(ME, names[0])).kv.device > 300
            turn = await r.turn(names[0], "and more")
        assert (turn.kv.host, turn.usage.recomputed) == (0, [])


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
