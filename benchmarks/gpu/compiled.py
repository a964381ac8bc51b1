"""What the GPU kernels compile to, without a GPU: registers, local memory (spills), shared memory.

    PYTHONPATH=. python benchmarks/gpu/compiled.py [--out FILE] [--target sm_90] [--only TEXT]

Compiles the launches that the public wrappers would make (their tensors are on the meta device) and
asks cuobjdump, which triton brings along, for the resources of each cubin. Exits with 1 if one on
sm_90 spills registers.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import agentserve_kernels.gpu
import torch
import triton
from agentserve_kernels.gpu.launch import Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.circumstances import circumstances
from benchmarks.gpu.launches import cases

TARGETS = {"sm_80": 80, "sm_90": 90}
REQUIRED = "sm_90"  # where no kernel may spill
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
ALIGNMENT = 16  # what triton looks for at a launch: bytes of a pointer, or a divisor of a number


def main() -> None:
    options = parse()
    result = circumstances("what the GPU kernels compile to")
    result |= {"triton": triton.__version__, "sources": sources()}
    work = [
        (index, target)
        for index, case in enumerate(cases())
        for target in options.target or TARGETS
        if options.only in f"{case.kernel}, {case.shape}"
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(measure, *zip(*work, strict=True)))
    spilled = [row for row in rows if row["stack_bytes"] or row["local_bytes"]]
    result |= {"spilled": len(spilled), "kernels": rows}
    text = json.dumps(result, indent=2) + "\n"
    if options.out:
        options.out.write_text(text)
    for row in rows:
        print("  ".join(f"{value:>6}" for value in row.values()))
    sys.exit(1 if any(row["target"] == REQUIRED for row in spilled) else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--only", default="", help="cases whose kernel and shape contain this")
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args()


def sources() -> str:
    """Return a digest of the kernels' source files: which ones the figures belong to."""
    digest = hashlib.sha256()
    for path in sorted(Path(agentserve_kernels.gpu.__file__).parent.glob("*.py")):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def measure(index: int, target: str) -> dict[str, Any]:
    case = list(cases())[index]
    head = {"kernel": case.kernel, "shape": case.shape, "target": target}
    return head | resources(case.make(), target)


def source(launch: Launch) -> ASTSource:
    """Return the kernel specialised to the launch's arguments, as triton does when it runs it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % ALIGNMENT == 0:
                attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(launch.kernel, signature, constants, attributes)


def resources(launch: Launch, target: str) -> dict[str, int]:
    """Compile; return registers, bytes of stack and of local memory (a thread), shared bytes."""
    tuning, gpu = launch.tuning, GPUTarget("cuda", TARGETS[target], 32)
    compiled = triton.compile(source(launch), target=gpu, options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {
        "registers": int(used["REG"]),
        "stack_bytes": int(used["STACK"]),
        "local_bytes": int(used["LOCAL"]),
        "shared_bytes": compiled.metadata.shared,
        "warps": tuning.warps,
        "stages": tuning.stages,
    }


if __name__ == "__main__":
    main()
