"""The tools that a replay really runs."""

import pytest

from agentserve.replay.scenario import Call, Scenario, ScenarioTool, ScenarioTurn
from agentserve.replay.tools import StoryTools
from agentserve.replay.workspace import ToolError, Workspace

FILES = {"a.py": "one = 1\ntwo = 2\n", "lib/b.py": "import sys\nprint(*sys.argv[1:])\n1 / 0\n"}


@pytest.fixture
def workspace():
    with Workspace(FILES) as made:
        yield made


def test_the_directory_is_gone_afterwards():
    with Workspace(FILES) as made:
        assert (made.root / "lib" / "b.py").is_file()
    assert not made.root.exists()


def test_lines_are_counted_from_one(workspace):
    assert workspace.read_lines("a.py", 2, 5) == "two = 2"
    with pytest.raises(ToolError, match=r"a\.py has 2 lines"):
        workspace.read_lines("a.py", 3, 1)


def test_a_text_is_replaced_only_when_it_occurs_once(workspace):
    workspace.replace("a.py", "one = 1", "one = 11")
    assert workspace.read_lines("a.py", 1, 1) == "one = 11"
    for old, times in (("=", 2), ("three", 0), ("", 0)):
        with pytest.raises(ToolError, match=f"found {times} times"):
            workspace.replace("a.py", old, "x")


def test_text_is_inserted_before_a_line_or_at_the_end(workspace):
    workspace.insert("a.py", 1, "zero = 0\n")
    workspace.insert("a.py", 4, "three = 3\n")
    assert (workspace.root / "a.py").read_text().split() == (
        ["zero", "=", "0", "one", "=", "1", "two", "=", "2", "three", "=", "3"]
    )


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "lib/../../x"])
def test_no_tool_leaves_the_workspace(workspace, path):
    with pytest.raises(ToolError, match="leaves the workspace"):
        workspace.read_lines(path, 1, 1)


async def test_a_python_file_is_run_and_its_traceback_names_no_directory(workspace):
    done = await workspace.run("python lib/b.py 'two words'")
    assert done.output.startswith("two words\n")
    assert 'File "lib/b.py", line 3' in done.output
    assert "ZeroDivisionError" in done.output
    assert "exit status 1" in done.output


@pytest.mark.parametrize(
    "command", ["ls", "python", "python -c 'x'", "sh a.py", "python none.py", "python 'a.py"]
)
async def test_nothing_but_a_python_file_of_the_workspace_is_run(workspace, command):
    with pytest.raises(ToolError):
        await workspace.run(command)


async def test_a_shell_cannot_be_smuggled_into_a_command(workspace):
    done = await workspace.run("python lib/b.py ; touch made $(touch made)")
    assert done.output.startswith("; touch made $(touch made)\n")
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
    tools = StoryTools(_story(_tool("read_lines", True), _tool("ask", False)), workspace)
    read = {"path": "a.py", "start": 1, "count": 1}
    outputs = await tools.scripted(
        [Call("ask", {}, "yes"), Call("read_lines", read), Call("ask", {}, "no")]
    )
    assert [output.output for output in outputs] == ["yes", "one = 1", "no"]


async def test_a_model_s_unknown_or_wrong_calls_are_error_results(workspace):
    tools = StoryTools(_story(_tool("read_lines", True)), workspace)
    outputs = await tools.free([("fly", {}), ("read_lines", {"path": 3}), ("read_lines", None)])
    assert [output.status for output in outputs] == ["error"] * 3


def test_a_real_tool_that_no_workspace_has_is_refused(workspace):
    with pytest.raises(ValueError, match="no such real tool: fly"):
        StoryTools(_story(_tool("fly", True)), workspace)
