"""Claude Code or Codex, as `agentserve launch` starts it: it repairs a file and runs its test."""

import json
import os
import subprocess
import sys
from pathlib import Path

from task import arguments, finish

TASK = "The test in test_total.py fails. Repair total.py."

url, (tool,) = arguments()
environments = Path(os.environ["COMPAT_ENVIRONMENTS"])
if tool == "claude":
    (bundled,) = (environments / "claude").glob("lib/*/site-packages/claude_agent_sdk/_bundled")
    arguments_ = ["-p", TASK, "--output-format", "json", "--allowedTools", "Bash"]
else:
    bundled = environments / "npm" / "node_modules" / ".bin"
    # Its sandbox needs rights that containers do not give.
    arguments_ = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    arguments_ += ["--output-last-message", "answer.txt", TASK]
Path("total.py").write_text("def total(numbers):\n    return sum(numbers) + 1\n")
Path("test_total.py").write_text(
    "from total import total\n\nassert total([1, 2]) == 3, total([1, 2])\nprint('passed')\n"
)
done = subprocess.run(
    [sys.executable, "-m", "agentserve", "launch", tool, "--url", url, "--", *arguments_],
    env=os.environ | {"PATH": f"{bundled}{os.pathsep}{os.environ['PATH']}"},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
)
sys.stderr.write(done.stdout)
finish(json.loads(done.stdout)["result"] if tool == "claude" else Path("answer.txt").read_text())
