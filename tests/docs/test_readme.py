"""What the README says of the client is run: as it stands, and on SmolLM2."""

import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from live_server import serving

from agentserve.assembly import build_app

pytestmark = pytest.mark.model

README = Path(__file__).resolve().parents[2] / "README.md"
ADDRESS = "http://127.0.0.1:8000"


def tool_loop() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    return str(block)


def wait_until_ready(port: int) -> None:
    """`agentserve serve` says when it is ready; an app that was just started does not."""
    for _ in range(2400):  # the kernels may have to be compiled first
        if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError("the server is not ready after four minutes")


def test_the_tool_loop_is_about_twenty_lines() -> None:
    assert len([line for line in tool_loop().splitlines() if line.strip()]) <= 22


def test_the_tool_loop_calls_the_right_tools_and_answers_from_their_results() -> None:
    with serving(build_app("smollm2-135m", in_process=True)) as port:
        wait_until_ready(port)
        code = tool_loop()
        assert code.count(ADDRESS) == 1
        code = code.replace(ADDRESS, f"http://127.0.0.1:{port}")
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr
    weather, report, product, number = done.stdout.splitlines()
    assert weather == "get_weather({'city': 'Oslo'})"
    assert "4 degrees" in report
    assert product == "multiply({'a': 37, 'b': 12})"
    assert "444" in number
    for answer in (report, number):
        counts = re.search(r" \| cached: ([0-9]+) new: ([0-9]+)$", answer)
        assert counts is not None
        assert int(counts[1]) > int(counts[2]) > 0


def test_an_embedded_client_that_nobody_closes_ends_with_its_program() -> None:
    code = (
        "from agentserve import Client\n"
        "session = Client.embedded().session()\n"
        "print(session.step('hi', max_output_tokens=2).status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "incomplete\n", "")
