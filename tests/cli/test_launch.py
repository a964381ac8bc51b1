"""`agentserve launch`: what the tool is told, and when it is not started.

The tools are programs that write down how they were called; the real ones are run by `make compat`.
"""

import json
import os
import subprocess
import sys
import tomllib

import pytest
from live_server import serving
from served import served

from agentserve.assembly import Backend, assemble
from agentserve.cli.launch import MODEL_CONTEXTS, TOOLS
from agentserve.config import ServerSettings
from agentserve.model.prepare import prepare

pytestmark = pytest.mark.model  # the text side is SmolLM2's

CONTEXT = 65_536
RECORDER = """#!{python}
import json, os, sys
json.dump({{"arguments": sys.argv[1:], "variables": dict(os.environ)}}, open({out!r}, "w"))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server():
    """Yield the address of a server whose model has a large context."""
    with served(max_context=CONTEXT, num_blocks=CONTEXT // 16) as running:
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture(scope="module")
def keyed():
    """Yield the address of one that wants a key."""
    settings = ServerSettings(api_keys=("s3cret",))
    with served(settings, key="s3cret", max_context=CONTEXT, num_blocks=CONTEXT // 16) as running:
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture(scope="module")
def small():
    """Yield the address of one whose model has 2,048 tokens of context."""
    with served() as running:
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture
def launch(tmp_path):
    """Run the command with a recorder in place of each tool; return the process and the record."""
    record = tmp_path / "called.json"

    def call(*arguments, installed=True, **variables):
        tools = tmp_path / "bin"
        tools.mkdir(exist_ok=True)
        for name in TOOLS if installed else ():
            program = tools / name
            program.write_text(RECORDER.format(python=sys.executable, out=str(record)))
            program.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-m", "agentserve", "launch", *arguments],
            env=os.environ | {"PATH": str(tools)} | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, json.loads(record.read_text()) if record.exists() else None

    return call


def refusal(done):
    """Return the one line that says why nothing was started."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_claude_is_pointed_at_the_server_for_every_kind_of_model(server, launch):
    done, told = launch("claude", "--url", server, "--", "-p", "hello", "--model", "x")
    assert done.returncode == 7  # the tool's own
    assert told["arguments"] == ["-p", "hello", "--model", "x"]
    variables = told["variables"]
    assert variables["ANTHROPIC_BASE_URL"] == server
    models = {name: value for name, value in variables.items() if name.endswith("_MODEL")}
    assert len(models) == 6
    assert set(models.values()) == {"smollm2-135m"}
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == str(CONTEXT)
    assert 0 < int(variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) < CONTEXT


def test_claude_gets_the_servers_key_and_not_the_users_own(server, launch):
    _, told = launch("claude", "--url", server, ANTHROPIC_API_KEY="sk-of-the-user")
    assert "ANTHROPIC_API_KEY" not in told["variables"]
    assert told["variables"]["ANTHROPIC_AUTH_TOKEN"]
    assert "sk-of-the-user" not in told["variables"].values()


def test_codex_gets_a_provider_in_toml_before_the_users_own_arguments(server, launch):
    done, told = launch("codex", "--url", f"{server}/", "--", "exec", "-c", 'model="mine"')
    assert done.returncode == 7
    *own, verb, option, value = told["arguments"]
    assert (verb, option, value) == ("exec", "-c", 'model="mine"')
    assert own[0::2] == ["-c"] * (len(own) // 2)
    settings = tomllib.loads("\n".join(own[1::2]))
    provider = settings["model_providers"]["agentserve"]
    assert settings["model_provider"] == "agentserve"
    assert settings["model"] == "smollm2-135m"
    assert settings["model_context_window"] == CONTEXT
    assert provider["base_url"] == f"{server}/v1"
    assert provider["wire_api"] == "responses"
    assert told["variables"][provider["env_key"]]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_key_is_asked_for_and_handed_on(keyed, launch, tool):
    done, told = launch(tool, "--url", keyed)
    assert told is None
    assert "--api-key" in refusal(done)
    _, told = launch(tool, "--url", keyed, AGENTSERVE_API_KEY="s3cret")
    assert "s3cret" in told["variables"].values()
    assert "s3cret" not in told["arguments"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_model_with_too_small_a_context_is_refused_and_others_are_named(small, launch, tool):
    done, told = launch(tool, "--url", small)
    assert told is None
    line = refusal(done)
    assert f"{tool} needs a context of {TOOLS[tool].least_context} tokens" in line
    assert "smollm2-135m has 2048" in line
    fitting = [name for name, size in MODEL_CONTEXTS.items() if size >= TOOLS[tool].least_context]
    assert fitting
    assert all(name in line for name in fitting)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_is_not_installed_is_one_line_that_says_how_to_have_it(launch, server, tool):
    done, _ = launch(tool, "--url", server, installed=False)
    line = refusal(done)
    assert f"{tool} is not installed" in line
    assert TOOLS[tool].install in line


def test_a_server_without_its_model_yet_is_one_line(launch, tmp_path):
    never = {"failures": 1000, "count": str(tmp_path / "tries")}
    backend = Backend("seam_factories:broken", never, in_process=True)
    with serving(assemble(prepare("smollm2-135m"), backend).app) as port:
        done, told = launch("claude", "--url", f"http://127.0.0.1:{port}")
    assert told is None
    assert "is not ready" in refusal(done)


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.1:9", "is `agentserve serve` running there?"), ("x:/", "no answer from")],
)
def test_no_server_is_one_line(launch, url, reason):
    done, told = launch("claude", "--url", url)
    assert told is None
    assert reason in refusal(done)
