"""Section `residency`: KV that moves between the tiers, measured with the project's own parts."""

import argparse
import gc

import torch

from benchmarks.gpu.exactness import exactness
from benchmarks.gpu.report import Report
from benchmarks.gpu.resume import resume
from benchmarks.gpu.sizes import GPU, TINY
from benchmarks.gpu.swap import bandwidth, overlap


def run(report: Report, options: argparse.Namespace) -> None:
    """Run the parts, the longest last; one that fails leaves its traceback."""
    sizes, device = (TINY if options.tiny else GPU), options.device
    report.put(note="random weights; the steps are those of the GPU runner")
    for name, work in (
        ("bandwidth", lambda: bandwidth(sizes, device)),
        ("overlap", lambda: overlap(sizes, device)),
        ("exactness", lambda: exactness(sizes, device)),
        ("resume", lambda: resume(sizes, device, report)),
    ):
        report.part(name, work)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
