"""The checks of llm-comply: shapes of answers and events, and the order of events."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import said, scripted

pytestmark = pytest.mark.model
CALL = {"type": "tool_call", "name": "get_weather", "arguments": {"location": "Paris"}}
ANTHROPIC = ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
# What is skipped asks for reasoning by the names of OpenAI's and Anthropic's own models.
CHECKS = {"openai-chat": (8, []), "open-responses": (12, []), "anthropic": (8, ANTHROPIC)}


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("llm_comply")
    call = {"output": [CALL], "when": "weather", "repeat": True}
    with scripted(call, said("Hello there, my friend.", repeat=True)) as running:
        yield running


@pytest.mark.parametrize("dialect", CHECKS)
def test_every_check_that_applies_passes(server, dialect):
    least, options = CHECKS[dialect]
    program = shutil.which("llm-comply", path=str(Path(sys.executable).parent))
    command = [str(program), "--format", dialect, "-u", f"{server.url}/v1", "-k", "x", "-m", "m"]
    done = subprocess.run(
        [*command, "--json", *options], capture_output=True, text=True, check=False, timeout=120
    )
    results = json.loads(done.stdout)["results"]
    failed = [(one["id"], one.get("errors")) for one in results if one["status"] == "failed"]
    assert failed == []
    assert sum(one["status"] == "passed" for one in results) >= least
