"""The Python example of API.md is run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from scripted import said, scripted

from agentserve.server import routes

ADDRESS = "http://127.0.0.1:8000"


def test_the_example_in_the_contract_of_the_api_runs(tmp_path: Path) -> None:
    text = (Path(routes.__file__).parent / "API.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (tmp_path / "test_a.py").write_text("def test_a():\n    assert 0\n")
    arguments = {"pattern": "assert", "path": str(tmp_path / "test_a.py")}
    call = {"type": "tool_call", "name": "grep", "arguments": arguments}
    answers = (
        {"when": "failing", "output": [call]},
        said("It is test_a.", when="assert 0"),
        said("Done.", when="fix it"),
        said("It asserts 0.", when="explain"),
    )
    with scripted(*answers) as server:
        assert code.count(ADDRESS) == 1
        code = code.replace(ADDRESS, server.url)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It is test_a. ")
