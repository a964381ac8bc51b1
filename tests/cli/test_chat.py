"""`agentserve chat` as a process, on a real server whose model's words are dictated."""

import signal
from pathlib import Path

from command_process import command, started, until
from forced import calls, says

from agentserve import Client


def test_a_conversation_from_piped_lines_shows_figures_and_obeys_commands(server, story, tmp_path):
    long = "word " * 3000
    story(
        says("Hello."),
        calls(("list_files", {})),
        says("Nothing there."),
        says("Again."),
        says("too long: never said"),
        says("In the copy."),
    )
    code, out, err = command(
        *("chat", "--tools", "files", "--dir", str(tmp_path), "--url", server[1]),
        *("--session", "talk"),
        said="/rollback\nhi\n/tools\nwhat is here?\n/rollback\nonce more\n"
        f"{long}\n/fork\nand?\n/dance\n"
        "/help\n/quit\nnot reached\n",
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("session talk; ")
    assert lines[1] == "[there is no message to take back]"
    assert lines[2] == "Hello."
    assert "read_file (changes nothing): Read a text file." in lines
    assert "[list_files {}]" in lines
    assert any(line.startswith("[back at t_1") for line in lines)
    assert any("tokens do not fit the context of 2048" in line for line in lines)
    assert "no command /dance; /help lists them" in lines
    figures = [line for line in lines if " | cached " in line]
    assert len(figures) == 5
    assert " tok/s | cached " in figures[1]
    assert "(device " in figures[1]
    assert " of 2048]" in figures[1]
    with Client(server[1]) as client:
        talk = client.session(id="talk", resume=True)
        assert [turn.text for turn in talk.turns] == ["Hello.", "Again."]


def test_an_interrupt_cancels_what_runs_and_not_the_conversation(server, story, tmp_path):
    story(
        says("Hello."),
        calls(("shell", {"command": "echo $$ > pid; sleep 600"})),
        says("Still here."),
    )
    pid = tmp_path / "pid"
    with started(
        *("chat", "--tools", "shell", "--approve", "auto", "--dir", str(tmp_path)),
        *("--url", server[1]),
    ) as process:
        process.stdin.write("hi\nwait\n")
        process.stdin.flush()
        until(lambda: pid.exists() and pid.read_text().strip())
        process.send_signal(signal.SIGINT)
        process.stdin.write("are you there?\n")
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    lines = out.splitlines()
    assert lines.index("[cancelled]") < lines.index("Still here.")
