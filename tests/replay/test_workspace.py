"""The tools that a replay really runs."""

import pytest

from agentserve.replay.scenario import Call, Scenario, ScenarioTool, ScenarioTurn
from agentserve.replay.tools import StoryTools
from agentserve.replay.workspace import ToolError, Workspace

FILES = {
    "a.py": "one = 1\ntwo = 2\n",
    "lib/b.py": "1\n2\n3\n4\n5\n",
    "check.py": "import sys\nprint(*sys.argv[1:], sep='|')\n1 / 0\n",
}


@pytest.fixture
def workspace():
    with Workspace(FILES) as made:
        yield made


def test_the_directory_is_gone_afterwards():
    with Workspace(FILES) as made:
        assert (made.root / "lib" / "b.py").is_file()
    assert not made.root.exists()


def test_three_lines_are_read_from_a_line_counted_from_one(workspace):
    assert workspace.read("lib/b.py", 1) == "1\n2\n3"
    assert workspace.read("a.py", 2) == "two = 2"
    with pytest.raises(ToolError, match=r"a\.py has 2 lines"):
        workspace.read("a.py", 3)


def test_a_text_is_replaced_only_when_it_occurs_once(workspace):
    workspace.replace("a.py", "one = 1", "one = 11")
    assert workspace.read("a.py", 1) == "one = 11\ntwo = 2"
    for old, times in (("=", 2), ("three", 0), ("", 0)):
        with pytest.raises(ToolError, match=f"found {times} times"):
            workspace.replace("a.py", old, "x")


def test_lines_are_inserted_before_a_line_or_at_the_end(workspace):
    workspace.insert("a.py", 1, "zero = 0\n")
    workspace.insert("a.py", 5, "three = 3\nfour = 4")
    assert (workspace.root / "a.py").read_text() == (
        "zero = 0\n\none = 1\ntwo = 2\nthree = 3\nfour = 4\n"
    )
    for line in (0, 8):
        with pytest.raises(ToolError, match=r"a\.py has 6 lines"):
            workspace.insert("a.py", line, "x")


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "lib/../../x"])
def test_no_tool_leaves_the_workspace(workspace, path):
    with pytest.raises(ToolError, match="leaves the workspace"):
        workspace.read(path, 1)


async def test_checks_are_run_by_name_and_a_traceback_names_no_directory(workspace):
    done = await workspace.run("sum total")
    assert done.output.startswith("sum|total\n")
    assert 'File "check.py", line 3' in done.output
    assert "ZeroDivisionError" in done.output
    assert "exit status 1" in done.output
    everything = await workspace.run()
    assert everything.output.startswith("\n")


async def test_without_a_check_file_there_is_nothing_to_run():
    with Workspace({}) as empty, pytest.raises(ToolError, match=r"no such file: check\.py"):
        await empty.run("sum")


async def test_a_shell_cannot_be_smuggled_into_the_name_of_a_check(workspace):
    done = await workspace.run("a ; touch made $(touch made) 'b")
    assert done.output.startswith("a|;|touch|made|$(touch|made)|'b\n")
    assert not (workspace.root / "made").exists()


def _story(*tools: ScenarioTool) -> Scenario:
    turn = ScenarioTurn(user="go", text="done")
    return Scenario(
        format=1, name="n", description="d", system="s", turns=[turn], tools=list(tools)
    )


def _tool(name: str, real: bool) -> ScenarioTool:
    return ScenarioTool(
        name=name, description="", parameters={"type": "object"}, example={}, real=real
    )


async def test_scripted_and_real_results_come_in_call_order(workspace):
    tools = StoryTools(_story(_tool("read", True), _tool("ask", False)), workspace)
    read = {"path": "a.py", "line": 2}
    outputs = await tools.scripted(
        [Call("ask", {}, "yes"), Call("read", read), Call("ask", {}, "no")]
    )
    assert [output.output for output in outputs] == ["yes", "two = 2", "no"]


async def test_a_model_s_unknown_or_wrong_calls_are_error_results(workspace):
    tools = StoryTools(_story(_tool("read", True)), workspace)
    outputs = await tools.free([("fly", {}), ("read", {"path": 3}), ("read", None)])
    assert [output.status for output in outputs] == ["error"] * 3


def test_a_real_tool_that_no_workspace_has_is_refused(workspace):
    with pytest.raises(ValueError, match="no such real tool: fly"):
        StoryTools(_story(_tool("fly", True)), workspace)
