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

CASES = {
    case.__name__: case
    for area in (gpu_row_cases, gpu_attention_cases, gpu_sampling_cases)
    for case in area.CASES
}


def outcome(name, device):
    """Return "passed" or the traceback of a case."""
    try:
        CASES[name](device)
    except Exception:
        return traceback.format_exc()
    return "passed"


def chosen(arguments):
    """Return the names of the cases to run."""
    if arguments[:1] == ["--share"]:
        return list(CASES)[int(arguments[1]) :: int(arguments[2])]
    return arguments or list(CASES)


if __name__ == "__main__":
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    print(json.dumps({name: outcome(name, device) for name in chosen(sys.argv[1:])}))
