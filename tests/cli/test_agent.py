"""`agentserve run` as a process, on a real server whose model's words are dictated."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_process import command, started, until
from forced import calls, says

from agentserve import Client

HANDSHAKE = Path(__file__).parents[1] / "support" / "handshake_server.py"


def shell(text):
    return calls(("shell", {"command": text}))


def results(body):
    return [(item["output"], item["status"]) for item in body["input"]]


def test_a_task_is_done_with_tools_in_a_directory_and_the_answer_alone_is_on_stdout(
    server, story, tmp_path
):
    (tmp_path / "a.txt").write_text("hello")
    front = story(
        calls(("read_file", {"path": "a.txt"})),
        shell("echo more >> a.txt"),
        calls(("python", {"code": "print(open('a.txt').read())"})),
        says("It says\x1b[2J hello more."),
    )
    code, out, err = command(
        *("run", "read it", "--tools", "files,shell,python", "--approve", "auto"),
        *("--dir", str(tmp_path), "--url", server[1], "--system", "Be brief."),
    )
    assert (code, out) == (0, "It says[2J hello more.\n")
    assert '[shell {"command": "echo more >> a.txt"}]' in err
    assert "[shell: ok, " in err
    assert results(front.turns[1]) == [("hello", "ok")]
    assert results(front.turns[3]) == [("hellomore", "ok")]
    created = next(body for action, body in front.posts if action == "sessions")
    assert created["system"] == "Be brief."
    assert [one["name"] for one in created["tools"]][-2:] == ["shell", "python"]


def test_calls_that_change_something_are_asked_for_and_no_answer_is_no(server, story, tmp_path):
    front = story(
        calls(("list_files", {})),
        *[shell(f"touch {name}") for name in ("no", "yes", "always", "unasked")],
        calls(("python", {"code": "open('silence', 'w')"})),
        says("Done."),
    )
    code, out, err = command(
        *("run", "go", "--tools", "files,shell,python", "--dir", str(tmp_path)),
        *("--url", server[1]),
        said="n\ny\na\n",
    )
    assert (code, out) == (0, "Done.\n")
    assert err.count("Allow ") == 4
    assert 'Allow shell {"command": "touch no"}' in err
    assert [results(body)[0][1] for body in front.turns[1:]] == [
        *("ok", "cancelled", "ok", "ok", "ok", "cancelled"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["always", "unasked", "yes"]
    assert err.count("the user said no") == 1
    assert err.count("nobody is there to ask") == 1


def test_what_changes_something_can_be_refused_and_json_tells_everything(server, story, tmp_path):
    story(shell("touch one"), calls(("list_files", {})), says("Done."))
    code, out, _ = command(
        *("run", "go", "--tools", "shell,files", "--approve", "deny", "--json"),
        *("--dir", str(tmp_path), "--url", server[1], "--session", "as-json"),
    )
    told = json.loads(out)
    assert (code, told["session"], told["text"], told["stop_reason"]) == (
        *(0, "as-json", "Done.", "end"),
    )
    assert [(one["name"], one["status"]) for one in told["calls"]] == [
        ("shell", "cancelled"),
        ("list_files", "ok"),
    ]
    assert told["calls"][1]["output"] == "no files"
    assert len(told["turns"]) == 3


def test_a_run_that_ends_without_an_answer_says_so_and_can_be_gone_on_with(server, story, tmp_path):
    story(shell("echo 1"), says("Done."))
    common = ("--tools", "shell", "--approve", "auto", "--dir", str(tmp_path))
    common += ("--url", server[1], "--session", "used-up")
    code, out, err = command("run", "go", *common, "--max-turns", "1")
    assert (code, out) == (3, "")
    assert "no answer: after 1 turns it still calls tools; see --max-turns" in err
    # Another program does not know that the first one did not run the call.
    assert command("run", *common)[:2] == (0, "Done.\n")


def test_a_tool_that_nobody_has_is_told_to_the_model_and_one_that_runs_elsewhere_to_the_user(
    server, story
):
    front = story(calls(("nine", {})), says("Done."), calls(("far", {})))
    common = ("run", "go", "--tools", "files", "--url", server[1])
    assert command(*common)[:2] == (0, "Done.\n")
    assert results(front.turns[1])[0][0].startswith("there is no tool named nine")
    with Client(server[1]) as client:
        client.session(id="far", tools=[{"name": "far", "parameters": {"type": "object"}}])
    code, out, err = command(*common, "--session", "far")
    assert (code, out) == (3, "")
    assert "no answer: it calls far, which the session has and which was not given here" in err


def test_an_interrupted_run_ends_its_tools_and_exits_with_130(server, story, tmp_path):
    story(shell("echo $$ > pid; sleep 600"))
    pid = tmp_path / "pid"
    with started(
        *("run", "go", "--tools", "shell", "--approve", "auto", "--dir", str(tmp_path)),
        *("--url", server[1]),
    ) as process:
        until(lambda: pid.exists() and pid.read_text().strip())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_mcp_servers_give_tools_one_that_fails_is_named_and_new_ones_come_with_a_message(
    server, story, tmp_path
):
    pytest.importorskip("mcp")
    file = tmp_path / "mcp.json"
    good = {"command": sys.executable, "args": [str(HANDSHAKE)]}
    file.write_text(json.dumps({"mcpServers": {"good": good, "bad": {"command": "/no/such"}}}))
    front = story(calls(("one", {})), says("Done."), calls(("two", {})), says("Done too."))
    code, out, err = command(
        *("chat", "--mcp", str(file), "--approve", "auto", "--url", server[1]),
        said="go\nonce more\n",
    )
    assert (code, err.count("\n")) == (0, 1)
    assert "MCP server bad gives no tools: " in err
    lines = out.splitlines()
    assert lines.index("Done.") < lines.index("Done too.")
    assert any(line.startswith("[the tools changed: ") for line in lines)
    assert [results(front.turns[n]) for n in (1, 3)] == [[("called", "ok")]] * 2


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("remote", "left out far, farther: 'http://x/y': only references inside the schema work"),
        ("wrong-type", "left out odd: properties.a.type: 'strin' is not valid"),
    ],
)
def test_tools_of_an_mcp_server_that_cannot_be_used_are_left_out_and_named(
    server, story, tmp_path, kind, said
):
    pytest.importorskip("mcp")
    file = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": [str(HANDSHAKE), kind]}
    file.write_text(json.dumps({"mcpServers": {"odd-one": entry}}))
    front = story(says("Done."))
    code, out, err = command("run", "go", "--mcp", str(file), "--url", server[1])
    assert (code, out, err.count("\n")) == (0, "Done.\n", 1), err
    assert err.startswith("agentserve: MCP server odd-one: left out ")
    assert said in err
    created = [body for action, body in front.posts if action == "sessions"][-1]
    assert [one["name"] for one in created["tools"]] == ["one"]


@pytest.mark.parametrize("arguments", [("run", "go"), ("chat",)])
def test_without_the_mcp_package_a_line_says_what_to_install(tmp_path, arguments):
    file = tmp_path / "mcp.json"
    file.write_text('{"mcpServers": {}}')
    program = (
        "import sys\n"
        "sys.modules['mcp'] = None\n"
        "from agentserve.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--mcp", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("agentserve: tools of MCP servers need the mcp package: pip ")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run"], 2, "a task is needed"),
        (["run", "x", "--tools", "files,teleport"], 2, "no tools teleport"),
        (["run", "x", "--url", "http://127.0.0.1:9", "--model", "smollm2-135m"], 2, "exclude"),
        (["run", "x", "--approve", "maybe"], 2, "maybe"),
        (["run", "x", "--mcp", "/no/such.json"], 2, "/no/such.json"),
        (["run", "x", "--url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
    ],
)
def test_wrong_usage_and_failures_are_told_without_a_traceback(capsys, arguments, code, said):
    from agentserve.cli import main

    with pytest.raises(SystemExit) as done:
        main(arguments)
    captured = capsys.readouterr()
    assert (done.value.code, captured.out) == (code, "")
    assert said in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.model
def test_a_model_in_this_process_reads_a_file_and_answers(tmp_path):
    (tmp_path / "notes.txt").write_text("The password is swordfish.\n")
    code, out, err = command(
        *("run", "Read the file notes.txt.", "--model", "smollm2-135m", "--tools", "files"),
        *("--dir", str(tmp_path), "--max-turns", "5"),
    )
    assert (code, bool(out.strip())) == (0, True), err
    assert "[read_file: ok, " in err


def test_an_interrupt_at_a_question_ends_the_run(server, story, tmp_path):
    story(shell("echo no"))
    arguments = ("run", "go", "--tools", "shell", "--dir", str(tmp_path), "--url", server[1])
    with started(*arguments) as process:
        for line in process.stderr:
            if line.startswith("Allow"):
                break
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
        err = process.stderr.read()
    assert code == 130
    assert "Fatal" not in err


@pytest.mark.parametrize("command", [("run", "go"), ("chat",)])
def test_who_has_no_input_says_no(server, story, tmp_path, command):
    story(*([shell("echo no"), says("Then not.")] if command[0] == "run" else []))
    line = [sys.executable, "-m", "agentserve", *command, "--tools", "shell"]
    line += ["--dir", str(tmp_path), "--url", server[1]]
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *line], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_who_closes_an_output_does_without_it(server, story, tmp_path, closed):
    story(calls(("list_files", {})), says("Done."))
    line = [sys.executable, "-m", "agentserve", "run", "go", "--tools", "files"]
    line += ["--dir", str(tmp_path), "--url", server[1]]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *line],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "" if closed == ">&-" else "Done.\n")
    assert "Traceback" not in done.stderr
