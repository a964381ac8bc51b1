"""llm-comply's checks of the three dialects: all of them, none skipped, without a warning."""

import json
import subprocess
import sys

import pytest
from scripted import called, said, scripted

# A check of reasoning is skipped unless the model has such a name; the loaded one answers to any.
KEY_HEADER = ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
FORMS = {
    "openai-chat": (9, ["-m", "gpt-5"]),
    "open-responses": (13, ["-m", "gpt-5"]),
    "anthropic": (9, ["-m", "claude-opus-4", *KEY_HEADER]),
}
# There is no compaction of responses, which is optional: its check passes on a 404, with a warning.
NOT_OFFERED = {"compact-response"}
THOUGHT = {"output": [{"type": "reasoning", "text": "37 * 15."}, {"type": "text", "text": "555"}]}


@pytest.fixture(scope="module")
def server():
    """Yield the address of a server that thinks, calls and counts."""
    answers = [
        called("San Francisco", when="weather", repeat=True),
        {**THOUGHT, "when": "15 * 37", "repeat": True},
        said("One, two, three, four, five.", repeat=True),
    ]
    with scripted(*answers, family="qwen3") as running:
        yield running.url


@pytest.mark.parametrize("form", FORMS)
def test_llm_comply_has_nothing_to_say(server, form):
    checks, options = FORMS[form]
    command = [
        sys.executable,
        "-c",
        "import sys; from llm_comply.cli import main; sys.exit(main())",
    ]
    command += ["--format", form, "-u", f"{server}/v1", "-k", "any", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = json.loads(done.stdout)["results"]
    assert len(results) == checks
    assert [one for one in results if one["status"] != "passed"] == []
    assert {one["id"] for one in results if one.get("warnings")} <= NOT_OFFERED
