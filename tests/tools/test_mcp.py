"""Tools of real MCP servers, in this process, on stdio and over HTTP."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from live_server import serving

pytest.importorskip("mcp")

from agentserve_tools import Executor, Toolbox, tool
from agentserve_tools.mcp_servers import McpConnections
from mcp_server import make_server

SUPPORT = Path(__file__).parents[1] / "support"
TOOLS = ["add", "picture", "point", "environment", "wait", "fail", "crash", "grow", "note_write"]


def program(script="mcp_server.py", *arguments, **more):
    return {"command": sys.executable, "args": [str(SUPPORT / script), *arguments], **more}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    def write(**servers):
        path = tmp_path_factory.mktemp("mcp") / "mcp.json"
        path.write_text(json.dumps({"mcpServers": servers}))
        return path

    return write


@pytest.fixture(scope="module")
def on_stdio(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_TOKEN", "s3cret")
        with Toolbox.from_mcp_config(config(support=program(env={"GIVEN": "1"}))) as box:
            yield box


@pytest.fixture(scope="module")
def in_process():
    with Toolbox() as box:
        box.connect(McpConnections({"support": make_server()}))
        yield box


@pytest.fixture(params=["in_process", "on_stdio"])
def toolbox(request):
    return request.getfixturevalue(request.param)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.01)


async def test_the_tools_of_a_server_are_listed_called_and_told_of_failures(toolbox, tmp_path):
    assert (list(toolbox), toolbox.failed_servers) == (TOOLS, {})
    run = Executor(toolbox).run
    assert [spec.name for spec in toolbox.specs if spec.read_only] == TOOLS[:4]
    assert toolbox["add"].spec.parameters["required"] == ["a", "b"]
    assert toolbox["add"].spec.description == "Add two numbers."
    assert (await run("add", {"a": 1, "b": 2})).output == "3"
    assert (await run("picture", {})).output == "a dot\n[image omitted]"
    assert json.loads((await run("point", {"x": 4})).output) == {"x": 4, "y": 8}
    note = tmp_path / "note"
    assert (await run("note_write", {"path": str(note), "text": "hi"})).output == "written"
    assert note.read_text() == "hi\n"
    failed = await run("fail", {"why": "no such row"})
    assert (failed.status, "no such row" in failed.output) == ("error", True)
    assert "valid integer" in (await run("add", {"a": "x", "b": 1})).output
    assert (await run("add", [1])).output == (
        "invalid arguments for add: expected an object, got list"
    )


async def test_a_call_that_is_out_of_time_or_cancelled_is_cancelled_in_the_server(
    toolbox, tmp_path
):
    run = Executor(toolbox).run
    record = tmp_path / "record"
    arguments = {"path": str(record), "seconds": 60}
    late = await run("wait", arguments, deadline_s=0.5)
    assert (late.status, late.output) == ("error", "wait did not finish within 0.5 s")
    await until(lambda: record.read_text() == "cancelled")
    task = asyncio.create_task(run("wait", arguments))
    await until(lambda: record.read_text() == "started")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: record.read_text() == "cancelled")


async def test_a_server_gets_only_what_its_entry_gives_of_the_environment(on_stdio):
    names = (await Executor(on_stdio).run("environment", {})).output.split()
    assert "GIVEN" in names
    assert "SECRET_TOKEN" not in names


async def test_a_changed_list_waits_until_it_is_asked_for(toolbox):
    run = Executor(toolbox).run
    assert toolbox.refresh() is False
    await run("grow", {})
    assert list(toolbox) == TOOLS
    await until(toolbox.refresh)
    assert sorted(toolbox) == sorted([*TOOLS, "subtract"])
    assert (await run("subtract", {"a": 5, "b": 3})).output == "2"


async def test_a_server_that_dies_fails_its_call_and_is_started_again_for_the_next(on_stdio):
    run = Executor(on_stdio).run
    lost = await run("crash", {})
    assert lost.status == "error"
    assert lost.output == (
        "the connection to the MCP server support was lost during the call; "
        "whether it had an effect is not known"
    )
    assert (await run("add", {"a": 2, "b": 2})).output == "4"


async def test_a_server_of_the_older_protocol_works_and_tells_of_its_new_list(config):
    with Toolbox.from_mcp_config(config(old=program("handshake_server.py"))) as box:
        assert (list(box), box["one"].spec.read_only) == (["one"], True)
        assert (await Executor(box).run("one", {})).output == "called"
        await until(box.refresh)
        assert list(box) == ["one", "two"]


async def test_a_bad_server_names_itself_and_does_not_hide_the_others(config):
    servers = {
        "good": program("handshake_server.py"),
        "missing": {"command": "/no/such/program"},
        "broken": program("handshake_server.py", "broken"),
        "nowhere": {"url": "http://127.0.0.1:9/mcp"},
        "neither": {"args": []},
        "typed": {"command": "x", "args": "not a list"},
        "sse": {"url": "http://127.0.0.1:9/sse", "type": "sse"},
        "off": {"command": "x", "disabled": True},
    }
    with Toolbox.from_mcp_config(config(**servers)) as box:
        assert list(box) == ["one"]
        reasons = box.failed_servers
    assert set(reasons) == set(servers) - {"good", "off"}
    assert "no licence found" in reasons["broken"]
    assert "/no/such/program" in reasons["missing"]
    assert reasons["neither"] == "it needs either `command` or `url`"
    assert "$.args" in reasons["typed"]


@pytest.mark.parametrize("wrong", ["text", "no-schema", "array"])
def test_a_server_whose_list_is_no_list_hides_no_other(config, wrong):
    servers = {
        "good": program("handshake_server.py"),
        "bad": program("handshake_server.py", wrong),
    }
    with Toolbox.from_mcp_config(config(**servers)) as box:
        assert list(box) == ["one"]
        assert "ListToolsResult" in box.failed_servers["bad"]


def test_a_tool_that_is_listed_again_and_again_is_one(config):
    with Toolbox.from_mcp_config(config(s=program("handshake_server.py", "repeated"))) as box:
        assert list(box) == ["same"]


def test_tools_beyond_those_of_a_session_and_refused_ones_are_left_out(config):
    with Toolbox.from_mcp_config(config(s=program("handshake_server.py", "many")), [own]) as box:
        assert (len(box), len(box.left_out)) == (128, 373)
        assert box.left_out["s", "t127"] == "a session has 128 tools at most"
        assert box.leave_out("t3", "x" * 1000)
        assert ("t3" in box, len(box.left_out["s", "t3"])) == (False, 300)
        assert not box.leave_out("own", "it is no tool of a server")
        assert not box.leave_out("t3", "it is gone")
        assert next(iter(box)) == "own"


def own() -> str:
    return "own"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"mcpServers": []}', '{"servers": {}}'])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text):
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mcp\.json is not"):
        Toolbox.from_mcp_config(path)


def test_names_are_made_valid_and_unique():
    @tool(name="add")
    def own(a: int) -> int:
        return a

    with Toolbox([own]) as box:
        servers = {"first": make_server(), "second one": make_server()}
        box.connect(McpConnections(servers))
        assert next(iter(box)) == "add"
        assert {"first_add", "note_write", "second_one_add", "second_one_note_write"} < set(box)
        assert len(box) == 1 + 2 * len(TOOLS)


async def test_a_server_over_http_is_called_with_the_headers_of_its_entry(config):
    seen = []
    app = make_server().streamable_http_app()

    async def watching(scope, receive, send):
        if scope["type"] == "http":
            seen.append(dict(scope["headers"]).get(b"x-key"))
        await app(scope, receive, send)

    with serving(watching) as port:
        entry = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Key": "k"}}
        box = await asyncio.to_thread(Toolbox.from_mcp_config, config(web=entry))
        assert box.failed_servers == {}
        run = Executor(box).run
        assert (await run("add", {"a": 1, "b": 2})).output == "3"
    assert set(seen) == {b"k"}
    outputs = []
    for _ in range(2):
        outputs.append((await run("add", {"a": 1, "b": 2})).output)
    await asyncio.to_thread(box.close)
    outputs.append((await run("add", {"a": 1, "b": 2})).output)
    assert "web was lost during the call" in outputs[0]
    assert outputs[1].startswith("the MCP server web is not there: ")
    assert outputs[2] == "the connections to MCP servers are closed"


def test_closing_ends_the_servers(config):
    with Toolbox.from_mcp_config(config(old=program("handshake_server.py"))) as box:
        assert running("handshake_server.py") == 1
    assert running("handshake_server.py") == 0
    box.close()


def running(script):
    """Return how many children of this process run a script."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    pids = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return sum(script in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
