"""File tools stay in their directory; programs are bounded and leave nothing behind."""

import asyncio
import os
import re
import resource
from functools import partial
from pathlib import Path

import pytest
from agentserve_tools import Executor, Limits, Toolbox, Workspace


@pytest.fixture
def root(tmp_path):
    directory = tmp_path / "root"
    (directory / "src").mkdir(parents=True)
    (directory / "src" / "main.py").write_text("def main():\n    return 1\n")
    (directory / "notes.md").write_text("one\ntwo\nthree\n")
    (directory / "picture.bin").write_bytes(b"\xff\xfe\x00main")
    (tmp_path / "secret.txt").write_text("secret")
    return directory


@pytest.fixture
def call(root):
    run = Executor(Toolbox(Workspace(root, timeout_s=5).tools)).run

    async def text(name, **arguments):
        answer = await run(name, arguments)
        return answer.output

    return text


async def test_files_are_listed_read_searched_and_written(call, root):
    assert await call("list_files") == "notes.md\npicture.bin\nsrc/main.py"
    assert await call("list_files", pattern="*.py") == "src/main.py"
    assert await call("read_file", path="notes.md") == "one\ntwo\nthree\n"
    assert await call("read_file", path="notes.md", first_line=2, max_lines=1) == "two\n"
    assert await call("search", text="main") == "src/main.py:1: def main():"
    assert await call("search", text="absent") == "no matches"
    await call("write_file", path="new/deep.txt", content="hé\n")
    assert (root / "new" / "deep.txt").read_text() == "hé\n"


async def test_search_says_when_there_is_more(call):
    assert (await call("search", text="e", pattern="*.md", max_matches=1)).splitlines() == [
        "notes.md:1: one",
        "... there are more matches",
    ]


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "src/../../secret.txt", "out"])
@pytest.mark.parametrize("name", ["read_file", "write_file", "list_files", "search"])
async def test_paths_that_leave_the_directory_are_refused(call, root, name, path):
    (root / "out").symlink_to(root.parent)
    extra = {"write_file": {"content": "x"}, "search": {"text": "s"}}.get(name, {})
    assert "is outside the working directory" in await call(name, path=path, **extra)
    assert (root.parent / "secret.txt").read_text() == "secret"


async def test_links_out_of_the_directory_are_not_walked(call, root):
    (root / "link.txt").symlink_to(root.parent / "secret.txt")
    assert "link.txt" not in await call("list_files")
    assert await call("search", text="secret") == "no matches"


async def test_the_shell_returns_output_and_exit_status(call):
    assert await call("shell", command="echo out; echo err >&2; exit 3") == (
        "out\nerr\n[exit status 3]"
    )
    assert await call("shell", command="true") == "[no output]"


async def test_the_shell_does_not_see_the_environment(call, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    assert "SECRET_TOKEN" not in await call("shell", command="env")


async def test_given_variables_reach_the_shell(root):
    workspace = Workspace(root, environment={"GREETING": "hello"})
    assert (await workspace.shell("echo $GREETING")).output == "hello"


async def test_shell_output_is_capped_in_memory_and_whole_in_a_file_that_can_be_read(root):
    workspace = Workspace(root, max_output=100)
    answer = await workspace.shell("echo begin; head -c 3000000 /dev/zero | tr '\\0' x; echo end")
    assert answer.truncated
    assert len(answer.output) < 250
    assert answer.output.startswith("begin\nxxx")
    assert answer.output.endswith("xxxend")
    (path,) = re.findall(r"the whole is in (\S+) ", answer.output)
    whole = stored(path)
    assert (len(whole), whole[:6], whole[-4:]) == (6 + 3_000_000 + 4, "begin\n", "end\n")
    assert workspace.read_file(path, max_lines=1) == "begin\n"
    with pytest.raises(PermissionError):
        workspace.write_file(path, "")


@pytest.mark.parametrize(
    ("name", "arguments"), [("shell", {"command": "seq 9999"}), ("read_file", {"path": "long"})]
)
async def test_what_a_tool_has_cut_is_not_cut_again_by_the_executor(root, name, arguments):
    (root / "long").write_text("x" * 5000)
    box = Toolbox(Workspace(root, max_output=1000).tools)
    output = (await Executor(box, max_output=1000).run(name, arguments)).output
    assert output.count("characters left out") == 1


async def test_an_output_may_be_cut_without_a_file(root):
    answer = await Workspace(root, max_output=10, keep_whole=False).shell("seq 100")
    assert " is in " not in answer.output


async def test_a_text_that_occurs_once_is_replaced(call, root):
    assert await call("edit_file", path="notes.md", old="two\n", new="2\n") == (
        "replaced in notes.md"
    )
    assert (root / "notes.md").read_text() == "one\n2\nthree\n"
    for old, times in (("e", 3), ("absent", 0), ("", 0)):
        answer = await call("edit_file", path="notes.md", old=old, new="x")
        assert f"occurs {times} times" in answer
    assert (root / "notes.md").read_text() == "one\n2\nthree\n"


async def test_python_runs_in_the_directory_and_shows_its_errors(call, root):
    (root / "mine.py").write_text("VALUE = 41\n")
    assert await call("python", code="import mine\nprint(mine.VALUE + 1)") == "42"
    assert "ZeroDivisionError" in await call("python", code="1 / 0")


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(memory_bytes=200 << 20), "bytearray(300 << 20)"),
        (Limits(file_bytes=1000), "f = open('big', 'wb', 0); f.write(bytes(1000)); f.write(b'x')"),
        (Limits(open_files=16), "held = [open('/dev/null') for _ in range(32)]"),
        (Limits(cpu_s=1), "while True: pass"),
    ],
)
async def test_a_program_that_exceeds_a_limit_fails_and_this_one_does_not(root, limits, code):
    before = {name: resource.getrlimit(name) for name in range(8)}
    answer = await Workspace(root, limits=limits).python(code)
    assert "[exit status" in answer.output
    assert {name: resource.getrlimit(name) for name in range(8)} == before
    assert (await Workspace(root, limits=limits).python("print('fine')")).output == "fine"


async def test_programs_dump_no_core_and_limits_can_be_left_out(root):
    none = Limits(None, None, None, None, None)
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_CPU))"
    answer = await Workspace(root, limits=none).python(code)
    assert answer.output == f"(0, 0) {resource.getrlimit(resource.RLIMIT_CPU)}"


async def test_a_program_cannot_read_from_this_ones_terminal(call):
    assert await call("shell", command="cat") == "[no output]"


def stored(path: str) -> str:
    return Path(path).read_text()


def gone(pid: int) -> bool:
    """Whether a process has ended (an unreaped zombie counts: nobody may reap it here)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until(condition) -> bool:
    for _ in range(1000):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


GRANDCHILD = "sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 1; done' & wait"


async def test_a_timeout_ends_grandchildren_that_ignore_sigterm(root):
    answer = await Workspace(root, timeout_s=0.4).shell("echo partly; " + GRANDCHILD)
    assert answer.status == "error"
    assert answer.output == "partly\n[ended after 0.4 s]"
    assert await until(partial(gone, int((root / "pid").read_text())))


async def test_cancelling_the_call_ends_the_whole_group(root):
    task = asyncio.create_task(Workspace(root).shell(GRANDCHILD))
    pid = root / "pid"
    assert await until(lambda: pid.exists() and pid.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await until(partial(gone, int((root / "pid").read_text())))


async def test_what_a_command_leaves_in_the_background_is_ended_with_it(root):
    answer = await Workspace(root).shell("sleep 600 & echo $!")
    assert await until(partial(gone, int(answer.output)))


async def test_the_shell_starts_in_the_directory(call, root):
    assert await call("shell", command="pwd") == os.fspath(root)
