"""Servers as processes: ready line, torch-free, restart of the engine, drain."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from agentserve.cli import main

SUPPORT = Path(__file__).parents[1] / "support"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}

pytestmark = pytest.mark.model  # the text side is SmolLM2's


def environment():
    """This environment, with the modules that tests share on the path."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def started(command):
    """Run a server command; yield (process, address, ready line)."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    errors = []
    drain = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    drain.start()
    try:
        line = process.stdout.readline()
        found = re.search(r"agentserve is ready: (http://\S+)", line)
        if found is None:
            process.wait(60)
            drain.join(10)
            pytest.fail(f"the server did not become ready: {line}{''.join(errors)}")
        yield process, found[1], line
    finally:
        process.kill()
        process.wait()
        drain.join(10)
        process.stdout.close()
        process.stderr.close()


def oracle(*options):
    return started([str(SUPPORT / "oracle_server.py"), *options])


def turn(client, session, text, **more):
    body = {"input": text, "max_output_tokens": 8} | more
    answer = client.post(f"/sessions/{session}/turn", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    done = answer.json()
    assert done["status"] in ("completed", "incomplete"), answer.text
    assert done["usage"]["output_tokens"] > 0
    return done


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def engine_pid(server):
    """Return the one child of the server process."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    (pid,) = children
    return int(pid)


def test_a_server_process_with_an_engine_process_serves_a_turn_and_never_imports_torch():
    with oracle() as (process, url, line):
        assert "context 8192 tokens" in line
        assert "KV 65536 tokens" in line
        with httpx.Client(base_url=url) as client:
            assert client.get("/ready").status_code == 200
            session = client.post("/sessions", json={"tools": [TOOL]}).json()["id"]
            turn(client, session, "hello", tool_choice="none")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == "torch imported: False\n"


def test_an_engine_in_a_thread_gives_the_same_tokens_as_one_in_a_process():
    outputs = []
    for form in ("process", "thread"):
        with oracle(form) as (_, url, _line), httpx.Client(base_url=url) as client:
            session = client.post("/sessions", json={"system": "You look."}).json()["id"]
            first, second = (turn(client, session, text) for text in ("one", "two"))
            tokens = client.get(f"/sessions/{session}/transcript?format=tokens").json()
            outputs.append((tokens, first["usage"], second["usage"]))
    assert outputs[0] == outputs[1]


def test_a_killed_engine_fails_the_turn_and_the_next_turn_equals_an_untouched_twins():
    with oracle("slow") as (process, url, _), httpx.Client(base_url=url) as client:
        broken, twin = (client.post("/sessions", json={}).json()["id"] for _ in range(2))
        for session in (broken, twin):
            turn(client, session, "first")
        pid = engine_pid(process)
        answers = []
        long = threading.Thread(
            target=lambda: answers.append(
                client.post(
                    f"/sessions/{broken}/turn",
                    json={"input": "second", "max_output_tokens": 2000},
                    timeout=60,
                )
            )
        )
        long.start()
        wait_until(lambda: client.get(f"/sessions/{broken}").json()["state"] == "running")
        os.kill(pid, signal.SIGKILL)
        long.join(60)
        failed = answers[0].json()
        assert (failed["status"], failed["error"]["code"]) == ("failed", "engine_down")
        assert "SIGKILL" in failed["error"]["message"]
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert engine_pid(process) != pid
        after = [turn(client, session, "third") for session in (broken, twin)]
        tokens = [
            client.get(f"/sessions/{session}/transcript?format=tokens").json()["tokens"]
            for session in (broken, twin)
        ]
        assert tokens[0] == tokens[1]
        assert after[0]["usage"]["output_tokens"] == after[1]["usage"]["output_tokens"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_turn_go_on_for_a_while_then_cancels_it_and_ends_everything(number):
    with oracle("slow") as (process, url, _), httpx.Client(base_url=url) as client:
        session = client.post("/sessions", json={}).json()["id"]
        pid = engine_pid(process)
        body = {"input": "go on", "max_output_tokens": 2000, "stream": True}
        with client.stream("POST", f"/sessions/{session}/turn", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if "turn.started" in line)
            process.send_signal(number)
            *_, last = (line for line in lines if line.startswith("data:"))
        done = json.loads(last.removeprefix("data:"))
        assert (done["type"], done["turn"]["status"]) == ("turn.done", "cancelled")
        assert process.wait(60) == 0
        wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason():
    out = subprocess.run(
        [sys.executable, str(SUPPORT / "oracle_server.py"), "thread", "broken"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert out.returncode == 1
    assert out.stdout.startswith("failed: the engine failed to start 3 times: MemoryError: ")


def test_ps_lists_the_sessions_of_a_server(capsys):
    with oracle() as (_, url, _line), httpx.Client(base_url=url) as client:
        client.post("/sessions", json={"id": "run-7"})
        turn(client, "run-7", "hello")
        for arguments in (["ps", "--url", url], ["ps", "--url", url, "--json"]):
            with pytest.raises(SystemExit) as done:
                main(arguments)
            assert done.value.code == 0
        table, document = capsys.readouterr().out.rsplit("\n[", 1)
        header, row = table.splitlines()
        assert header.split()[:4] == ["session", "state", "turns", "tokens"]
        assert row.split()[:3] == ["run-7", "idle", "1"]
        (session,) = json.loads("[" + document)
        assert (session["id"], session["turns"]) == ("run-7", 1)


def test_serve_runs_the_embedded_model():
    command = ["-m", "agentserve", "serve", "--port", "0", "--kv-device", "64M"]
    command += ["--kv-host", "32MiB", "--kv-policy", "lru+host"]
    with started(command) as (process, url, line):
        assert "context 8192 tokens" in line
        with httpx.Client(base_url=url) as client:
            session = client.post("/sessions", json={}).json()["id"]
            answer = turn(client, session, "What is the capital of France?", max_output_tokens=12)
            assert "Paris" in answer["output"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
