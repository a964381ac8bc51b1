"""The client against the whole server, over a socket and embedded, on the hash oracle."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from served import Served, assembled, served

from agentserve import AsyncClient, Client, errors, tool, user, wire
from agentserve.client.embedded import URL, Server, SyncTransport
from agentserve.config import ServerSettings

FEW = {"max_output_tokens": 4}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServerSettings(allow_force=True), step_s=0.002) as running:
        yield running


@pytest.fixture(scope="module", params=["socket", "embedded"])
def client(request, server) -> Iterator[Client]:
    if request.param == "socket":
        with Client(f"http://127.0.0.1:{server.port}") as client:
            yield client
        return
    app = assembled(ServerSettings(allow_force=True), step_s=0.002).app
    with Client(URL, transport=SyncTransport(Server(app))) as client:
        yield client


def force(*parts):
    return wire.Debug(force=list(parts))


def test_turns_build_on_each_other_and_cost_only_what_is_new(client):
    s = client.session(system="Be brief.")
    first = s.step("hello", **FEW)
    second = s.step("and now?", **FEW)
    assert (first.status, first.stop_reason) == ("incomplete", "max_tokens")
    assert s.head == second.id
    assert second.usage.cached_tokens > 0
    assert second.usage.input_tokens - second.usage.cached_tokens == second.usage.new_tokens
    assert [turn.id for turn in s.turns] == [first.id, second.id]
    assert s.info().head == second.id


def test_a_stream_gives_the_same_turn_as_a_step(client):
    stepped = client.session().step("hello", **FEW)
    s = client.session()
    with s.stream("hello", **FEW) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if isinstance(e, wire.TextDelta))
    assert text == stream.turn.text == stepped.text
    assert isinstance(events[-1], wire.TurnDone)
    assert s.head == stream.turn.id


def test_turns_without_output_leave_the_client_with_the_server_s_head(client):
    s = client.session()
    s.step("hello", **FEW)
    for given in ([], "and now?", []):
        s.step(given, max_output_tokens=0)
        assert s.step(None, **FEW).output
        assert s.head == s.info().head


def test_leaving_a_stream_cancels_the_turn_and_the_session_goes_on(client):
    s = client.session()
    with s.stream("hello", max_output_tokens=1000) as stream:
        next(event for event in stream if isinstance(event, wire.TextDelta))
    assert s.info().state == "idle"
    assert s.step("again", **FEW).stop_reason == "max_tokens"


def test_leaving_a_queued_turn_cancels_it_and_not_the_one_that_runs(client):
    s = client.session()
    with s.stream("hello", max_output_tokens=60) as running:
        next(event for event in running if isinstance(event, wire.TextDelta))
        with s.stream("me too", max_output_tokens=60, when_busy="queue") as queued:
            assert isinstance(next(queued), wire.TurnQueued)
        assert isinstance(list(running)[-1], wire.TurnDone)
    assert running.turn.stop_reason == "max_tokens"
    assert queued.turn is None
    assert len(s.turns) == 1


def test_run_calls_tools_and_feeds_their_results(client):
    called = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        called.append((a, b))
        return a + b

    @tool(read_only=True)
    def fail(why: str) -> str:
        """Fail."""
        raise ValueError(why)

    s = client.session(tools=[add, fail])
    calls = [wire.ToolCall("add", {"a": 1, "b": 2}), wire.ToolCall("fail", {"why": "no"})]
    last = s.run("go", max_turns=3, debug=force(*calls))
    assert called == [(1, 2), (1, 2)]
    assert [call.name for call in last.tool_calls] == ["add", "fail"]
    transcript = s.transcript("items")
    assert "ValueError: no" in str(transcript)


def test_results_can_be_given_by_hand(client):
    def add(a: int, b: int) -> int:
        return a + b

    s = client.session(tools=[add])
    t = s.step("go", debug=force(wire.ToolCall("add", {"a": 2, "b": 3})))
    assert t.stop_reason == "tool_calls"
    with pytest.raises(errors.ToolResultsMissing):
        s.step("never mind", **FEW)
    t = s.step([c.result(add(**c.arguments)) for c in t.tool_calls], **FEW)
    assert t.stop_reason == "max_tokens"


def test_results_can_be_staged_before_the_turn(client):
    def add(a: int, b: int) -> int:
        return a + b

    s = client.session(tools=[add])
    t = s.step("go", debug=force(wire.ToolCall("add", {"a": 2, "b": 3})))
    answer = s.tool_results([t.tool_calls[0].result(5)])
    assert answer.pending_calls == []
    assert s.step(None, **FEW).stop_reason == "max_tokens"


def test_fork_rollback_and_rewrite(client):
    s = client.session()
    turns = [s.step(f"question {n}", **FEW) for n in range(4)]
    twin = s.fork()
    assert [copy.head for copy in s.fork(2, at=turns[0])] == [turns[0].id] * 2
    same = twin.step("next", **FEW)
    assert same.usage.cached_tokens > 0

    s.rollback(before=turns[3])
    assert s.head == turns[2].id
    answer = s.rewrite([user("Summary: three questions."), *s.turns[-2:]])
    assert answer.head == s.head
    assert s.step("next", **FEW).stop_reason == "max_tokens"
    assert s.step("next", **FEW).text != ""


def test_an_older_head_is_refused(client):
    s = client.session(id="shared")
    s.step("one", **FEW)
    other = client.session(id="shared", resume=True)
    other.step("two", **FEW)
    with pytest.raises(errors.HeadMoved):
        s.step("three", **FEW)
    s.info()
    assert s.step("three", **FEW).stop_reason == "max_tokens"
    s.delete()


def test_errors_carry_their_details(client):
    with pytest.raises(errors.ContextFull) as caught:
        client.session().step("word " * 5000)
    assert caught.value.details["over"] > 0
    with pytest.raises(errors.InvalidRequest) as wrong:
        client.session().step("x", max_output_tokens=-1)
    assert "max_output_tokens" in (wrong.value.param or "")


def test_the_rest_of_the_interface_answers(client):
    s = client.session(metadata={"a": 1})
    s.step("hello", **FEW)
    s.hint(expected_ms=30_000)
    s.hint(expected_ms={"call_x": 500}, resume_in_ms=60_000, kv="device", close=False)
    assert s.info().residency.stall_ms == 0
    assert s.step("again", **FEW).kv.host == 0
    assert s.count("one two three").new_tokens > 0
    s.update(metadata={"a": 2})
    assert s.info().metadata == {"a": 2}
    assert s.id in [one.id for one in client.sessions(limit=1000).sessions]
    assert isinstance(s.transcript("openai"), list | dict)
    s.close()
    with pytest.raises(errors.SessionClosed):
        s.step("hello", **FEW)
    s.delete()
    s.delete()


def test_cancel_from_another_thread_keeps_what_was_asked_for(client):
    s = client.session()
    begun = threading.Event()
    done = []

    def read():
        with s.stream("hello", max_output_tokens=1000) as stream:
            for event in stream:
                if isinstance(event, wire.TextDelta):
                    begun.set()
            done.append(stream.turn)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    cancelled = s.cancel(keep="partial")
    reader.join(20)
    assert cancelled.stop_reason == "cancelled"
    assert done[0].id == cancelled.id
    assert s.step("go on", **FEW).stop_reason == "max_tokens"


async def test_the_async_client_does_the_same(server):
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    async with AsyncClient(f"http://127.0.0.1:{server.port}") as client:
        s = await client.session(tools=[double])
        seen = []
        t = await s.run(
            "go",
            max_turns=2,
            on_event=seen.append,
            debug=force(wire.ToolCall("double", {"n": 4})),
        )
        assert t.tool_calls[0].arguments == {"n": 4}
        assert sum(isinstance(event, wire.TurnDone) for event in seen) == 2
        t = await s.step([c.result(8) for c in t.tool_calls], **FEW)
        async with s.stream("more", **FEW) as stream:
            kinds = [type(event) async for event in stream]
        assert kinds[-1] is wire.TurnDone
        assert [turn.id for turn in await s.turns][-1] == stream.turn.id
        one = await s.fork()
        assert one.head == s.head


async def test_cancelling_the_task_cancels_the_turn(server):
    async with AsyncClient(f"http://127.0.0.1:{server.port}") as client:
        s = await client.session()
        task = asyncio.create_task(s.step("hello", max_output_tokens=1500))
        async with asyncio.timeout(20):
            while (await s.info()).state != "running":  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await s.info()).state == "idle"
        assert (await s.step("again", **FEW)).stop_reason == "max_tokens"
