"""`python oracle_server.py [thread] [slow | broken]`: the real server over the hash oracle.

Prints the address when it is ready and, once it has stopped, whether torch was ever imported.
"""

import os
import sys

from agentserve.assembly import Backend, assemble
from agentserve.cli.options import CommandFailed
from agentserve.cli.serving import listen, run
from agentserve.config import ServerSettings
from agentserve.model.prepare import prepare


def main() -> None:
    """Serve on a free port until SIGTERM or SIGINT."""
    options = {
        "vocab_size": 49152,
        "block_size": 16,
        "num_blocks": 4096,
        "max_context": 8192,
        "max_slots": 8,
    }
    factory, extra = "agentserve.engine.oracle:build_oracle", {}
    if "slow" in sys.argv:
        factory, extra = "seam_factories:slow", {"step_s": 0.05}
    if "broken" in sys.argv:
        factory, extra = "seam_factories:broken", {"failures": 99, "count": os.devnull}
    backend = Backend(factory, options | extra, in_process="thread" in sys.argv)
    server = ServerSettings(allow_force=True, drain_s=0.5)
    listener = listen("127.0.0.1", 0)
    try:
        run(assemble(prepare("smollm2-135m"), backend, server), listener, say)
    except CommandFailed as failure:
        say(f"failed: {failure}")
        sys.exit(1)
    say(f"torch imported: {'torch' in sys.modules}")


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
