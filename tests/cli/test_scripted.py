"""`agentserve serve --engine scripted:FILE`, as a process."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agentserve.cli import main

pytestmark = pytest.mark.model  # the text side is SmolLM2's
ANSWERS = [{"text": "Cold.", "when": "snow"}, {"text": "Hello.", "repeat": True}]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, ANSWERS)))
    return path


@contextlib.contextmanager
def serving(engine):
    command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", "--log-level", "error"]
    process = subprocess.Popen([*command, "--engine", engine], stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield process.pid, found[0]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def loaded_torch(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return ["libtorch" in Path(f"/proc/{one}/maps").read_text() for one in (pid, *children)]


@pytest.mark.parametrize(("form", "processes"), [("", 2), ("thread+", 1)])
def test_a_script_is_said_without_torch(script, form, processes):
    with serving(f"{form}scripted:{script}") as (pid, url):
        said = []
        for text in ("hi", "snow?", "snow?"):
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            said.append(answer["choices"][0]["message"]["content"])
        assert said == ["Hello.", "Cold.", "Hello."]
        assert loaded_torch(pid) == [False] * processes


@pytest.mark.parametrize(
    ("engine", "text", "code", "reason"),
    [
        ("scripted:{}", "[{]", 1, "line 1"),
        ("scripted:{}", "[{}]", 1, "answer 1 needs exactly one"),
        ("scripted:{}.none", "[]", 1, "No such file"),
        ("scripted:", "[]", 2, "is not one of process, thread"),
        ("fork+scripted:{}", "[]", 2, "is not one of process, thread"),
    ],
)
def test_a_bad_script_ends_the_command_with_its_reason(
    tmp_path, capsys, engine, text, code, reason
):
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--engine", engine.format(path)])
    assert ended.value.code == code
    said = " ".join(re.sub(r"[│╭╰─╯╮]", " ", capsys.readouterr().err).split())
    assert reason in said
