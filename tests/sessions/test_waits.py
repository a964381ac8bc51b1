"""What a session waits for, what the engine is told of that, and turns that are announced."""

import asyncio
import contextlib
import random

import msgspec
import pytest
from session_kv import TIMED, TWO, hinted, waiting
from session_rig import ME, TOOLS, calls, result, rig

from agentserve import wire
from agentserve.engine.messages import Hint, Promote
from agentserve.errors import InvalidRequest
from agentserve.sessions.toolkeys import MAX_KEY, tool_key
from agentserve.sessions.waits import LEAD_S, MAX_LEAD_S


def hint(r):
    return [command for command in r.link.sent if isinstance(command, Hint)][-1]


def promotions(r):
    return [command.begin for command in r.link.sent if isinstance(command, Promote)]


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


async def test_moves_of_the_head_and_forks_begin_a_wait_of_their_own():
    async with rig() as r:
        s, _ = await waiting(r)
        (fork,) = (await r.call("fork", s)).sessions
        assert hint(r).sequence == r.session(fork.id).mirror.sequence
        assert hint(r).tools == ["read", "write:make"]
        await r.call("rollback", s, before="t_1")
        assert (hint(r).sequence, hint(r).tools) == (r.session(s).mirror.sequence, [])


def test_hints_name_a_bounded_number_of_calls():
    many = {"expected_ms": {f"call_{number}": 1 for number in range(1025)}}
    with pytest.raises(msgspec.ValidationError, match="expected_ms"):
        msgspec.convert(many, wire.Hints)


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
