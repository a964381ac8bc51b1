"""What goes wrong in the server or its engine ends the turn that it concerns, never silently."""

import asyncio

import pytest
from session_rig import TOOLS, AnyText, calls, result, rig

from agentserve import wire
from agentserve.engine.grammars import Answer
from agentserve.engine.messages import Close
from agentserve.errors import EngineDown, ExceedsKvCapacity, StoreFull
from agentserve.sessions.store import MemoryStore


class BrokenStore(MemoryStore):
    """A store whose methods fail when they are told to."""

    def __init__(self):
        super().__init__()
        self.fail = {}

    def _check(self, method):
        if error := self.fail.get(method):
            raise error

    async def accept(self, session, turn, record):
        self._check("accept")
        await super().accept(session, turn, record)

    async def commit(self, session, turn, record):
        self._check("commit")
        await super().commit(session, turn, record)

    async def forget(self, session, turn):
        self._check("forget")
        await super().forget(session, turn)


async def last_event(handle):
    return [event async for _, event in handle.events()][-1]


async def test_when_the_engine_can_be_read_no_more_open_turns_end_and_ready_says_so():
    async with rig() as r:
        s, other = await r.create(), await r.create()
        r.link.hold = True
        running, queued = await r.start(s), await r.start(s, when_busy="queue")
        neighbour = await r.start(other)

        async def broken():
            raise OSError("bad frame")

        r.link.receive = broken
        service = asyncio.create_task(r.service.run())
        with pytest.raises(ExceptionGroup):
            await service
        for handle in (running, neighbour):
            turn = await handle.result()
            assert (turn.status, turn.error.code) == ("failed", "engine_error")
            assert isinstance(await last_event(handle), wire.ErrorEvent)
        assert (await queued.result()).error.code == "engine_down"
        ready, why = r.service.ready()
        assert not ready
        assert "OSError" in why
        with pytest.raises(EngineDown):
            await r.start(s)


async def test_an_event_that_cannot_be_handled_does_not_end_the_pump(caplog):
    async with rig() as r:
        s = await r.create()
        r.service.driver._ahead.lose = None
        r.link.crash()
        await r.settle(10)
        assert "could not be handled: Down" in caplog.text
        assert r.service.ready() == (False, "engine down: killed")
        r.link.start()
        await r.settle(10)
        assert (await r.turn(s)).status in ("completed", "incomplete")


async def test_a_turn_that_cannot_be_ended_properly_does_not_keep_others_from_ending():
    async with rig() as r:
        s, other = await r.create(), await r.create()
        r.link.hold = True
        broken, fine = await r.start(s), await r.start(other)
        r.session(s).running.decide = None
        r.link.crash()
        assert (await broken.result()).error.code == "engine_error"
        assert (await fine.result()).error.code == "engine_down"
        assert r.session(s).open_runs() == r.session(other).open_runs() == []


@pytest.mark.parametrize(
    ("error", "code"), [(StoreFull("full"), "store_full"), (OSError("disk"), "engine_error")]
)
async def test_a_turn_that_cannot_be_stored_fails_alone_and_the_head_stays(error, code):
    store = BrokenStore()
    async with rig(store=store) as r:
        s = await r.create()
        await r.turn(s)
        before = await r.tokens(s)
        handle = await r.start(s, "go")
        store.fail["commit"] = error
        turn = await handle.result()
        assert (turn.status, turn.error.code) == ("failed", code)
        assert await r.tokens(s) == before
        store.fail["accept"] = error
        with pytest.raises(type(error)):
            await r.start(s, "go")
        assert (await r.service.info("local", s)).state == "idle"
        store.fail.clear()
        again = await r.turn(s, "go")
        assert again.usage.recomputed == []


async def test_a_record_that_cannot_be_dropped_leaves_the_turn_as_it_was_told():
    store = BrokenStore()
    async with rig(store=store) as r:
        s = await r.create()
        r.session(s).lost.extend(f"t_{number}" for number in range(100, 164))
        r.link.hold = True
        handle = await r.start(s)
        store.fail["forget"] = OSError("disk")
        r.link.release()
        cancelled = await r.call("cancel", s)
        assert (await handle.result()) == cancelled
        assert cancelled.status == "cancelled"
        assert (await r.turn(s)).status in ("completed", "incomplete")


async def test_a_queued_turn_that_breaks_its_preparation_ends():
    async with rig() as r:
        s = await r.create()
        r.link.hold = True
        await r.start(s)
        queued, behind = [await r.start(s, "next", when_busy="queue") for _ in range(2)]
        prepare = r.service.driver.preparer.prepare

        def broken(run):
            if run.id == queued.turn_id:
                raise KeyError("template")
            prepare(run)

        r.service.driver.preparer.prepare = broken
        r.link.release()
        assert (await queued.result()).error.code == "engine_error"
        assert (await behind.result()).status in ("completed", "incomplete")


async def test_a_failing_prefill_ahead_leaves_the_results_staged(caplog):
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        (call,) = calls(await r.forced(s, "go", ("read", {"q": "a"})))
        extension = r.text.composer.extension
        r.text.composer.extension = None
        answer = await r.call("tool_results", s, results=[result(call, "x")])
        r.text.composer.extension = extension
        assert (answer.staged, answer.prefilled_tokens) == ([call], 0)
        assert "were not prefilled" in caplog.text
        assert (await r.forced(s, [], "ok")).status == "completed"


async def test_a_schema_that_the_grammar_compiler_refuses_names_what_to_change(monkeypatch):
    async with rig() as r:
        s = await r.create(tools=TOOLS)
        answer = {"type": "json_schema", "schema": {"type": "object"}}

        def refuses(self, job, spec):
            self._answers.append(Answer(job, error="unsupported pattern"))

        monkeypatch.setattr(AnyText, "begin", refuses)
        for body, code, param in (
            ({"tool_choice": "required"}, "bad_tool_schema", "tools"),
            ({"response_format": answer}, "invalid_request", "response_format.schema"),
        ):
            turn = await r.turn(s, "go", **body)
            assert (turn.status, turn.error.code, turn.error.param) == ("failed", code, param)
            assert "unsupported pattern" in turn.error.message
        assert (await r.service.info("local", s)).turns == 0


async def test_what_can_never_fit_the_kv_says_how_much_is_too_much():
    async with rig(oracle={"num_blocks": 16}) as r:
        s = await r.create()
        await r.turn(s, "hello")
        used = r.session(s).head.length
        with pytest.raises(ExceedsKvCapacity) as refused:
            await r.start(s, "word " * 300)
        details = refused.value.details
        assert (details["used"], details["limit"]) == (used, 256)
        assert details["over"] == used + details["input"] + 1 - 256


async def test_an_engine_that_dies_fails_the_turn_and_the_next_one_equals_an_untouched_twin_s():
    async with rig() as r:
        s, twin = await r.create(), await r.create()
        for one in (s, twin):
            await r.turn(one, "hello", max_output_tokens=20)
        before = await r.tokens(s)
        r.link.hold = True
        handle = await r.start(s, "go on", max_output_tokens=30)
        await r.steps(4)
        r.link.crash()
        turn = await handle.result()
        assert (turn.status, turn.error.code, turn.error.retryable) == (
            "failed",
            "engine_down",
            True,
        )
        assert isinstance([event async for _, event in handle.events()][-1], wire.ErrorEvent)
        assert r.service.ready() == (False, "engine down: killed")
        with pytest.raises(EngineDown):
            await r.start(s, "go on")
        assert await r.tokens(s) == before
        r.link.hold = False
        r.link.start()
        await r.settle(10)
        assert r.service.ready() == (True, "ready")
        again = await r.turn(s, "go on", max_output_tokens=30)
        assert {part.reason for part in again.usage.recomputed} == {"engine_restarted"}
        await r.turn(twin, "go on", max_output_tokens=30)
        assert await r.tokens(s) == await r.tokens(twin)


async def test_a_sequence_that_the_engine_lost_is_sent_again_whole():
    async with rig() as r:
        s = await r.create()
        await r.turn(s, "hello")
        r.link.engine.apply(Close(r.session(s).mirror.sequence))
        turn = await r.turn(s, "go on")
        assert turn.status in ("completed", "incomplete")
        assert r.link.log(r.session(s)).tolist() == await r.tokens(s)


async def test_a_fault_in_one_turn_is_an_error_and_the_session_goes_on():
    async with rig(oracle={"max_context": 512}) as r:
        s = await r.create()
        await r.turn(s, "hello")
        before = await r.tokens(s)
        r.link.hold = True
        handle = await r.start(s, "go on")
        (engine_turn,) = r.link.engine._turns.values()
        engine_turn.fault = "grammar: broken"
        r.link.engine._ledger.finish(engine_turn, "error")
        r.link.release()
        turn = await handle.result()
        assert (turn.status, turn.error.code) == ("failed", "engine_error")
        assert await r.tokens(s) == before
        assert (await r.turn(s, "go on")).status in ("completed", "incomplete")


async def test_a_fault_of_the_server_in_one_turn_ends_that_turn_only(caplog):
    async with rig() as r:
        s, other = await r.create(), await r.create()
        for one in (s, other):
            await r.turn(one, "hello")
        before = await r.tokens(s)
        r.link.hold = True
        handle, neighbour = await r.start(s, "go"), await r.start(other, "go")
        r.session(s).running.output.push = None
        r.link.release()
        turn = await handle.result()
        assert (turn.status, turn.error.code) == ("failed", "engine_error")
        assert "fault=server" in caplog.text
        assert (await neighbour.result()).status in ("completed", "incomplete")
        assert await r.tokens(s) == before
        assert (await r.turn(s, "go")).status in ("completed", "incomplete")
        assert await r.tokens(s) == await r.tokens(other)
