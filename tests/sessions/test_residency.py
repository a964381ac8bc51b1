"""Where the KV of a session is, what was moved for it, and the time that took."""

import asyncio

import msgspec
import pytest
from session_kv import crowded
from session_rig import ME, rig

from agentserve import wire
from agentserve.engine.messages import Finished, Inspect, Inspected, Residency
from agentserve.errors import SessionNotFound
from agentserve.server.idempotency import AnswerLedger
from agentserve.server.metrics import Metrics
from agentserve.sessions import residency

# What the engine tells


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
