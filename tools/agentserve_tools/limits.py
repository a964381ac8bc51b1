"""Sets resource limits, then becomes another program: `python limits.py NAME=VALUE... -- PROGRAM`.

Run as a file and by exec: code between fork and exec is not safe in a program with threads, and
the package itself would take longer to import than most commands run. So it imports nothing of it.
"""

import os
import resource
import sys


def main(arguments: list[str]) -> int:
    """Set each limit (`cpu`, `as`, `fsize`, ... of setrlimit(2)) and run the program in place."""
    end = arguments.index("--")
    for setting in arguments[:end]:
        name, _, value = setting.partition("=")
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        hard = resource.getrlimit(kind)[1]
        wanted = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(kind, (wanted, wanted))
    program = arguments[end + 1 :]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
