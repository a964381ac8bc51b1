"""Section `environment`: what the machine is."""

import argparse
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

from benchmarks.gpu.report import Report

PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "msgspec")
FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "clocks.max.sm",
)


def run(report: Report, options: argparse.Namespace) -> None:
    report.part("machine", machine)
    report.part("versions", versions)
    if options.device == "cpu":
        report.put(gpu="none: this run is on a CPU")
    else:
        report.part("gpu", lambda: gpu(options.device))
        report.part("flash_attention", lambda: flash_attention(options.device))
        report.part("nvidia_smi", nvidia_smi)


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
    }


def versions() -> dict[str, str]:
    """Return the installed versions; raises PackageNotFoundError for one that is missing."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES if name != "msgspec"}
    import msgspec  # carried along, perhaps without its metadata

    return found | {"msgspec": msgspec.__version__}


def gpu(device: str) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "free_bytes": free,
        "total_bytes": total,
    }


def flash_attention(device: str) -> bool:
    """Return whether torch has it for the shapes of `residency`; without it times mean little."""
    import torch

    query = torch.zeros((1, 32, 64, 128), dtype=torch.bfloat16, device=device)
    keys = torch.zeros((1, 8, 256, 128), dtype=torch.bfloat16, device=device)
    shapes = torch.backends.cuda.SDPAParams(query, keys, keys, None, 0.0, False, True)
    return torch.backends.cuda.can_use_flash_attention(shapes, debug=True)


def nvidia_smi() -> dict[str, str] | str:
    """Return the driver's own answers, the PCIe link among them, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not readable: {error}"
    values = answer.stdout.splitlines()[0].split(", ")
    return dict(zip(FIELDS, values, strict=True))
