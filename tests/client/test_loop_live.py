"""The tool loop on a real server whose model's words are dictated, with real tools and servers."""

import asyncio
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from agentserve_tools import Executor, Toolbox, Workspace
from forced import calls, forced_server, says, telling

from agentserve import AsyncClient, Client, ToolDone, ToolStarted, tool, wire
from agentserve.errors import BadToolSchema

MCP_SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"


@pytest.fixture(scope="module")
def server():
    """Yield (the app in front of the server, its address)."""
    with forced_server() as served:
        yield served


@pytest.fixture
def client(server):
    with Client(server[1]) as client:
        yield client


@pytest.fixture
def story(server):
    """Set what the model says in the next turns; return what was sent meanwhile."""
    with telling(server[0]) as tell:
        yield tell


def results(body):
    items = body["input"] if "input" in body else body["results"]
    return [(item["output"], item["status"]) for item in items]


@pytest.fixture(scope="module", params=["in-process", "stdio"])
def mcp_toolbox(request, tmp_path_factory):
    pytest.importorskip("mcp")
    if request.param == "in-process":
        from agentserve_tools.mcp_servers import McpConnections
        from mcp_server import make_server

        with Toolbox() as box:
            box.connect(McpConnections({"support": make_server()}))
            yield box
        return
    file = tmp_path_factory.mktemp("mcp") / "mcp.json"
    entry = f'{{"command": "{sys.executable}", "args": ["{MCP_SERVER}"]}}'
    file.write_text(f'{{"mcpServers": {{"support": {entry}}}}}')
    with Toolbox.from_mcp_config(file) as box:
        yield box


@pytest.mark.parametrize("form", ["sync", "async"])
async def test_ten_turns_with_the_tools_of_an_mcp_server(
    server, story, mcp_toolbox, tmp_path, form
):
    note = tmp_path / "note"
    write = ("note_write", {"path": str(note), "text": "line"})
    front = story(
        calls(("add", {"a": 1, "b": 2})),
        calls(("add", {"a": 10, "b": 20}), ("point", {"x": 2})),
        calls(write),
        calls(("fail", {"why": "no such row"}), write),
        calls(("picture", {})),
        calls(("add", {"a": 3, "b": "x"})),
        calls(("environment", {}), write, ("add", {"a": 5, "b": 5})),
        calls(("grow", {})),
        calls(("wait", {"path": str(tmp_path / "record"), "seconds": 0.1})),
        says("Done."),
    )
    seen = []
    if form == "sync":
        with Client(server[1]) as client:
            session = client.session(tools=mcp_toolbox)
            # A sync client in an async test: the tools run in a loop of their own.
            last = await asyncio.to_thread(session.run, "go", max_turns=10, on_event=seen.append)
    else:
        async with AsyncClient(server[1]) as client:
            session = await client.session(tools=mcp_toolbox)
            last = await session.run("go", max_turns=10, on_event=seen.append)
    assert (last.text, last.stop_reason) == ("Done.", "end")
    assert note.read_text() == "line\n" * 3
    assert len(front.turns) == 10
    assert front.turns[0]["input"] == "go"
    assert results(front.turns[1]) == [("3", "ok")]
    done = [(e.call.name, e.output.status) for e in seen if isinstance(e, ToolDone)]
    assert sorted(done) == sorted(
        [("add", "ok")] * 3
        + [("add", "error"), ("fail", "error"), ("grow", "ok"), ("wait", "ok")]
        + [("note_write", "ok")] * 3
        + [("point", "ok"), ("picture", "ok"), ("environment", "ok")]
    )
    turns = [event.turn for event in seen if isinstance(event, wire.TurnDone)]
    assert len(turns) == 10
    for before, turn in itertools.pairwise(turns):
        # What a turn fed and said is there in the next one, but for its last token.
        assert turn.usage.cached_tokens >= before.usage.input_tokens


def test_read_only_tools_begin_while_the_model_still_writes_and_others_after(client, story):
    order = []

    @tool(read_only=True)
    def look(n: int) -> str:
        return f"saw {n}"

    def change(n: int) -> str:
        return f"changed {n}"

    def note(event):
        if isinstance(event, ToolStarted):
            order.append(event.call.name)
        elif isinstance(event, wire.TurnDone):
            order.append("turn")

    front = story(calls(("change", {"n": 1}), ("look", {"n": 2})), says("Done."))
    session = client.session(tools=[look, change])
    assert session.run("go", on_event=note).text == "Done."
    assert order == ["look", "turn", "change", "turn"]
    assert results(front.turns[1]) == [("changed 1", "ok"), ("saw 2", "ok")]


def test_results_are_staged_while_other_calls_still_run(client, story):
    slow_may_end = threading.Event()

    def quick(n: int) -> str:
        return f"quick {n}"

    def slow() -> str:
        slow_may_end.wait(20)
        return "slow"

    front = story(calls(("quick", {"n": 1}), ("slow", {}), ("quick", {"n": 2})), says("Done."))
    session = client.session(tools=[quick, slow])
    running = threading.Thread(target=session.run, args=("go",))
    running.start()
    deadline = time.monotonic() + 20
    pending = []
    while [call.name for call in pending] != ["slow"]:
        assert time.monotonic() < deadline
        pending = session.info().pending_calls
    slow_may_end.set()
    running.join(20)
    assert results(front.turns[1]) == [("slow", "ok")]
    posted = [results(body) for action, body in front.posts if action == "tool_results"]
    assert sorted(itertools.chain(*posted)) == [("quick 1", "ok"), ("quick 2", "ok")]
    transcript = str(session.transcript("items"))
    places = [transcript.index(text) for text in ("quick 1", "'slow'", "quick 2", "Done.")]
    assert places[0] < places[2] < places[3]


def test_a_call_that_is_not_allowed_is_told_to_the_model(client, story, tmp_path):
    front = story(calls(("shell", {"command": "touch made"})), says("As you like."))
    workspace = Workspace(tmp_path)
    session = client.session(tools=workspace.tools)
    asked = []

    def approve(spec, arguments):
        asked.append((spec.name, arguments))
        return "not on my machine"

    assert session.run("go", approve=approve).text == "As you like."
    assert asked == [("shell", {"command": "touch made"})]
    assert results(front.turns[1]) == [
        ("the call of shell was not allowed: not on my machine", "cancelled")
    ]
    assert list(tmp_path.iterdir()) == []


def test_turns_that_are_used_up_leave_calls_that_can_be_run_later(client, story):
    ran = []

    @tool(read_only=True)
    def look() -> str:
        ran.append("look")
        return "seen"

    def change() -> str:
        ran.append("change")
        return "changed"

    front = story(calls(("look", {}), ("change", {})), says("Done."))
    session = client.session(tools=[look, change])
    stopped = session.run("go", max_turns=1)
    assert (stopped.stop_reason, ran) == ("tool_calls", [])
    assert session.run().text == "Done."
    assert sorted(ran) == ["change", "look"]
    assert results(front.turns[1]) == [("seen", "ok"), ("changed", "ok")]


def test_a_session_that_is_taken_up_runs_no_call_that_may_have_run_before(client, story):
    ran = []

    @tool(read_only=True)
    def look() -> str:
        ran.append("look")
        return "seen"

    def change() -> str:
        ran.append("change")
        return "changed"

    front = story(calls(("look", {}), ("change", {})), says("Done."))
    client.session(id="taken-up", tools=[look, change]).step("go")
    again = client.session(id="taken-up", resume=True, tools=[look, change])
    assert again.run().text == "Done."
    assert ran == ["look"]
    fate = "the program that made this call ended; whether the call had an effect is not known"
    assert [(action, results(body)) for action, body in front.posts[2:]] == [
        ("tool_results", [(fate, "cancelled")]),
        ("turn", [("seen", "ok")]),
    ]


def test_an_executor_that_knows_a_call_answers_it_in_a_session_that_is_taken_up(client, story):
    ran = []

    async def change() -> str:
        ran.append("change")
        return "changed"

    executor = Executor(Toolbox([change]))
    front = story(calls(("change", {})), says("Done."), says("Done too."))
    session = client.session(id="known", tools=executor)
    (call,) = session.step("go").tool_calls
    fork = session.fork()
    assert session.run().text == "Done."
    taken_up = client.session(id=fork.id, resume=True, tools=executor)
    assert taken_up.run().text == "Done too."
    assert ran == ["change"]
    assert [results(body) for body in front.turns[1:]] == [[("changed", "ok")]] * 2
    assert executor.has_run(call.call_id)


async def test_cancelling_a_run_ends_its_tools_and_the_session_goes_on(server, story, tmp_path):
    story(calls(("shell", {"command": "echo $$ > pid; sleep 600"})), says("Fine."))
    workspace = Workspace(tmp_path)
    async with AsyncClient(server[1]) as client:
        session = await client.session(tools=workspace.tools)
        task = asyncio.create_task(session.run("go"))
        pid = tmp_path / "pid"
        async with asyncio.timeout(20):
            while not (pid.exists() and pid.read_text().strip()):  # noqa: ASYNC110 - a process
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not os.path.exists(f"/proc/{pid.read_text().strip()}")  # noqa: ASYNC240
        assert (await session.info()).pending_calls[0].name == "shell"
        assert (await session.run("never mind", on_pending="cancel")).text == "Fine."


def test_a_run_that_ends_in_the_middle_ends_its_tools_first(client, story, tmp_path):
    endless = "echo $$ > pid; sleep 600"
    story(calls(("shell", {"command": endless}), ("write_file", {"path": "x", "content": ""})))
    pid = tmp_path / "pid"
    session = client.session(tools=Workspace(tmp_path).tools)

    def give_up(event):
        if isinstance(event, ToolStarted) and event.call.name == "write_file":
            while not (pid.exists() and pid.read_text().strip()):
                time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.run("go", on_event=give_up)
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    assert not (tmp_path / "x").exists()


def test_new_tools_of_a_session_are_told_between_its_turns(client, story):
    def one() -> str:
        return "1"

    def two() -> str:
        return "2"

    toolbox = Toolbox([one])
    executor = Executor(toolbox)
    story(calls(("one", {})), says("Done."), calls(("two", {})), says("Done again."))
    session = client.session(tools=executor)
    session.run("go")
    toolbox.add(two)
    assert session.update(tools=executor).new_tokens > 0
    assert session.run("go on").text == "Done again."


def test_a_call_of_a_tool_that_nobody_has_is_answered_and_the_loop_goes_on(client, story):
    def one() -> str:
        return "1"

    front = story(calls(("nine", {}), ("one", {})), calls(("n" * 64, {"a": 1})), says("Done."))
    session = client.session(id="nobody", tools=[one])
    assert session.run("go").text == "Done."
    unknown = ("there is no tool named nine; the tools are: one", "error")
    posted = [body for action, body in front.posts if action != "sessions"]
    answered = [results(body) for body in posted if body.get("input") != "go"]
    assert sorted(itertools.chain(*answered))[:2] == sorted([("1", "ok"), unknown])
    assert answered[-1] == [(f"there is no tool named {'n' * 64}; the tools are: one", "error")]


@pytest.mark.parametrize("taken_up", [False, True])
def test_a_call_of_a_tool_that_runs_elsewhere_is_returned_unanswered(client, story, taken_up):
    name = f"elsewhere-{taken_up}"
    story(calls(("far", {})))
    session = client.session(id=name, tools=[{"name": "far", "parameters": {"type": "object"}}])
    if taken_up:
        session = client.session(id=name, resume=True)
    assert [call.name for call in session.run("go").tool_calls] == ["far"]


def test_a_refused_tool_of_an_mcp_server_is_left_out_and_one_of_our_own_is_an_error(
    client, story, tmp_path
):
    pytest.importorskip("mcp")
    odd = {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}
    with pytest.raises(BadToolSchema) as refused:
        client.session(tools=[{"name": "own", "parameters": odd}])
    assert refused.value.param == "tools.own.parameters"
    file = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": [str(MCP_SERVER.parent / "handshake_server.py")]}
    entry["args"].append("remote")
    file.write_text(json.dumps({"mcpServers": {"s": entry}}))
    story(calls(("one", {})), says("Done."))
    session = client.session()
    with Toolbox.from_mcp_config(file) as box:
        session.update(tools=box)
        assert (list(box), list(box.left_out)) == (["one"], [("s", "far"), ("s", "farther")])
        assert session.run("go").text == "Done."
