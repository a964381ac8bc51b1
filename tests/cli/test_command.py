"""The command line as a user sees it: output, one-line errors, exit codes."""

import json
import socket
import subprocess
import sys

import pytest

from agentserve import __version__
from agentserve.cli import main
from agentserve.cli.serve import FirstStart, announce

COMMANDS = ["serve", "run", "chat", "replay", "report", "demo", "doctor", "ps", "launch", "version"]


@pytest.fixture
def run(capsys):
    """Run a command line; return exit code, stdout, stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return call


def test_help_names_every_command_and_the_exit_codes(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert command in out
    assert "Exit codes" in out


def test_the_summaries_of_the_commands_are_whole_at_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("--help")
    assert "..." not in out.partition("Commands:")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_options(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Exit codes" in out


def test_every_option_has_a_help_text():
    import typer.main

    from agentserve.cli import app

    group = typer.main.get_command(app)
    bare = [
        f"{name} {parameter.name}"
        for name, command in group.commands.items()
        for parameter in command.params
        if parameter.name != "help" and not getattr(parameter, "help", None)
    ]
    assert bare == []


def test_no_command_prints_the_help_and_is_wrong_usage(run):
    code, out, err = run()
    assert code == 2
    assert "serve" in out + err


def test_version_names_what_is_installed(run):
    code, out, _ = run("version")
    assert code == 0
    assert f"agentserve {__version__}" in out.splitlines()


def test_the_version_is_also_an_option(run):
    assert run("--version") == (0, f"agentserve {__version__}\n", "")


def test_version_as_json(run):
    code, out, _ = run("version", "--json")
    assert code == 0
    versions = json.loads(out)
    assert versions["agentserve"] == __version__
    assert versions["python"].startswith("3.")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_an_address_that_others_reach_needs_a_key(run, host, monkeypatch):
    monkeypatch.delenv("AGENTSERVE_API_KEY", raising=False)
    code, out, err = run("serve", "--host", host)
    assert (code, out) == (2, "")
    assert "--api-key" in err


def test_an_empty_key_is_no_key(run):
    code, _, err = run("serve", "--host", "0.0.0.0", "--api-key", " ")
    assert code == 2
    assert "may not be empty" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--kv-device", "plenty"],
        ["serve", "--kv-host", "-1"],
        ["serve", "--kv-host", "2 gigs"],
        ["serve", "--kv-policy", "lru"],
        ["doctor", "--kv-host", "much"],
        ["serve", "--dtype", "int3"],
        ["serve", "--engine", "fork"],
        ["serve", "--max-sessions", "0"],
        ["serve", "--port", "many"],
        ["ps", "--no-such-option"],
        ["dance"],
    ],
)
def test_wrong_usage_exits_with_2_and_without_a_traceback(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err


def test_a_port_in_use_is_one_line_that_says_what_to_do(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = run("serve", "--port", str(taken.getsockname()[1]))
    assert (code, out) == (1, "")
    assert err.startswith("agentserve: cannot listen on 127.0.0.1 port")
    assert err.count("\n") == 1
    assert "--port" in err


def test_a_model_that_is_not_there_is_one_line(run, tmp_path):
    code, out, err = run("serve", str(tmp_path / "no-model.gguf"), "--port", "0")
    assert (code, out) == (1, "")
    assert err.startswith("agentserve: ")
    assert err.count("\n") == 1
    assert "no-model.gguf" in err


@pytest.mark.parametrize(("terminal", "lines"), [(True, 2), (False, 1)])
def test_a_person_is_told_how_to_stop_and_a_program_reads_one_line(
    monkeypatch, capsys, terminal, lines
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    announce("agentserve is ready: http://127.0.0.1:8000")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "agentserve is ready: http://127.0.0.1:8000"
    assert len(rest) == lines - 1
    assert all("Ctrl-C" in line for line in rest)


def test_a_conversion_says_once_that_the_first_start_takes_long(capsys):
    progress = FirstStart("my.gguf")
    for done in (1, 2):
        progress(done, 2, "tensor")
    assert capsys.readouterr().err.count("first start: converting my.gguf") == 1


def test_ps_without_a_server_says_where_it_looked(run):
    code, out, err = run("ps", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert err.startswith("agentserve: no answer from http://127.0.0.1:9")
    assert err.count("\n") == 1


def test_ps_on_what_is_not_an_address_is_one_line(run):
    code, _, err = run("ps", "--url", "nonsense")
    assert code == 1
    assert err.count("\n") == 1


def test_looking_at_help_loads_neither_torch_nor_the_server():
    script = (
        "import sys\n"
        "import agentserve.cli\n"
        "print([name for name in ('torch', 'transformers', 'starlette', 'uvicorn')"
        " if name in sys.modules])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"
