"""Checks of the GPU kernels against their references, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python gpu_cases.py [NAME ... | --share I N]

`--share I N` runs every Nth case from the Ith on. Prints a JSON object: "passed" or a traceback for
each case. A process of its own, because triton reads TRITON_INTERPRET when it is imported. Needs
torch and triton only.
"""

import json
import os
import sys
import traceback

import gpu_attention_cases
import gpu_row_cases
import gpu_sampling_cases

CASES = (*gpu_row_cases.CASES, *gpu_attention_cases.CASES, *gpu_sampling_cases.CASES)


def outcome(case, device):
    """Return "passed" or the traceback of a case."""
    try:
        case(device)
    except Exception:
        return traceback.format_exc()
    return "passed"


def chosen(cases, arguments):
    """Return the cases to run, by name."""
    named = {case.__name__: case for case in cases}
    if arguments[:1] == ["--share"]:
        return dict(list(named.items())[int(arguments[1]) :: int(arguments[2])])
    return {name: named[name] for name in arguments or named}


def main(cases):
    """Run what the command line names; print what became of each."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    outcomes = {name: outcome(c, device) for name, c in chosen(cases, sys.argv[1:]).items()}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(CASES)
