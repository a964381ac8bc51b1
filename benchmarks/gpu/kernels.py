"""Section `kernels`: how fast our Triton kernels are, beside torch's and beside the memory."""

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import attention_times, row_times
from benchmarks.gpu.report import Report


def run(report: Report, options: argparse.Namespace) -> None:
    """Run the parts; the last one takes what time is left."""
    device, tiny = options.device, options.tiny
    shape = attention_times.TINY if tiny else attention_times.GPU
    sizes = row_times.TINY if tiny else row_times.GPU
    for name, work in (
        ("prefill", lambda: attention_times.prefill(report, device, shape)),
        ("decode", lambda: attention_times.decode(report, device, shape)),
        ("rows", lambda: row_times.rows(device, sizes)),
        ("tunings", lambda: attention_times.tunings(report, device, shape)),
    ):
        report.part(name, lambda work=work: on(device, work))
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def on(device: str, work: Callable[[], Any]) -> Any:
    """Do the work with the device as the current one, on which triton runs."""
    if device != "cpu":
        torch.cuda.set_device(device)
    return work()
