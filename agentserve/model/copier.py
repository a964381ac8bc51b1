"""The host tier, and copies to and from it: by a thread on the CPU, on side streams of a GPU.

One block is one contiguous record in both tiers, so a copy is one transfer. It moves the whole
record: what lies behind a tail's valid tokens means nothing in either tier.

On the CPU both tiers are DRAM and the host tier is an emulation of one: what it saves is recomputed
prefill, as on a GPU, but its bandwidth is not that of a link.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from agentserve_kernels.tensors import view

from agentserve.engine.plan import Copy, Traffic

log = logging.getLogger(__name__)
cuda: Any = torch.cuda  # its streams and events carry no types

POLL_S = 1e-4  # between two looks at the events of a GPU
EXIT_S = 5.0  # a copy takes milliseconds
DIRECTIONS = ("load", "save")  # in the order in which one worker serves them: turns wait for loads


def host_slab(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return [blocks, ...] records like those of `cache`; page-locked if the cache is on a GPU.

    Where the driver refuses to lock that much, copies work but do not overlap with compute.
    """
    slab = torch.empty((blocks, *cache.shape[1:]), dtype=cache.dtype)
    if cache.is_cuda:
        # Not `pin_memory=True`: that rounds the size up to a power of two.
        if int(cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0)):
            log.warning("cannot lock %d bytes of host KV: copies will be slow", slab.nbytes)
            _clear_error(cache.device)
        else:
            weakref.finalize(slab, cuda.cudart().cudaHostUnregister, slab.data_ptr())
    return slab


def open_device(cache: torch.Tensor, slab: torch.Tensor) -> "ThreadDevice | StreamDevice":
    """Return the `copier.Device` that moves blocks between these two tiers."""
    return StreamDevice(cache, slab) if cache.is_cuda else ThreadDevice(cache, slab)


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event of ThreadDevice: the first `count` copies of the stream."""

    stream: str
    count: int


class ThreadDevice:
    """A `copier.Device` on the CPU: one thread copies; compute runs in the caller's thread.

    Compute work is done when its call returns, so an event of "compute" is always done. The thread
    ends when this object goes, whatever is queued.
    """

    def __init__(self, cache: torch.Tensor, slab: torch.Tensor) -> None:
        self._worker = _Worker(cache, slab)
        thread = threading.Thread(target=self._worker.run, name="kv-copier", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._worker, thread)

    def record(self, stream: str) -> _Mark:
        """Return an event: all copies that have been queued on the stream so far."""
        return _Mark(stream, self._worker.queued.get(stream, 0))

    def wait(self, stream: str, event: _Mark) -> None:
        """Let work on the stream start after the event; on "compute", wait here and now."""
        with self._worker.changed:
            if stream == "compute":
                self._worker.changed.wait_for(lambda: self._worker.reached(event))
            else:
                self._worker.waits[stream].append(event)

    def copy(self, stream: str, copy: Copy) -> None:
        """Queue one block copy."""
        with self._worker.changed:
            self._worker.put(stream, copy)

    def done(self, event: _Mark) -> bool:
        """Return whether the event's copies have ended; raises RuntimeError if the thread died."""
        with self._worker.changed:
            return self._worker.reached(event)

    def block(self, events: Sequence[_Mark], timeout_s: float) -> None:
        """Return when one of the events is done, at the latest after the timeout."""
        with self._worker.changed:
            self._worker.changed.wait_for(
                lambda: any(self._worker.reached(event) for event in events), timeout_s
            )

    def traffic(self) -> Traffic:
        """Return what was copied, and the seconds that copying took."""
        with self._worker.changed:
            moved, busy = self._worker.moved, self._worker.busy
            return Traffic(moved["save"], busy["save"], moved["load"], busy["load"])


class _Worker:
    """What the thread does and shares; it must not keep its ThreadDevice alive.

    Everything but `run` and `stop` is called with `changed` held.
    """

    def __init__(self, cache: torch.Tensor, slab: torch.Tensor) -> None:
        # Arrays, because torch would copy with a pool of threads, against those that compute.
        near, far = view(cache), view(slab)
        self._ends = {"load": (far, near), "save": (near, far)}
        self.changed = threading.Condition()
        self.queued = dict.fromkeys(DIRECTIONS, 0)
        self.waits: dict[str, list[_Mark]] = {stream: [] for stream in DIRECTIONS}
        self.moved = dict.fromkeys(DIRECTIONS, 0)  # bytes
        self.busy = dict.fromkeys(DIRECTIONS, 0.0)  # seconds
        self._finished = dict.fromkeys(DIRECTIONS, 0)
        self._queues: dict[str, deque[tuple[Copy, list[_Mark]]]] = {
            stream: deque() for stream in DIRECTIONS
        }
        self._stopped = False
        self._failure: Exception | None = None

    def put(self, stream: str, copy: Copy) -> None:
        """Queue a copy behind the stream's others and the events that it waits for."""
        self._queues[stream].append((copy, self.waits[stream]))
        self.waits[stream] = []
        self.queued[stream] += 1
        self.changed.notify_all()

    def reached(self, mark: _Mark) -> bool:
        """Return whether the copies of `mark` have ended."""
        if self._failure is not None:
            raise RuntimeError("the thread that copies KV died") from self._failure
        return self._finished.get(mark.stream, 0) >= mark.count

    def run(self) -> None:
        """Copy until `stop` is called."""
        try:
            while (work := self._next()) is not None:
                self._copy(*work)
        except Exception as error:  # the engine must hear of it instead of waiting for ever
            with self.changed:
                self._failure = error
                self.changed.notify_all()

    def stop(self) -> None:
        """End the thread after the copy that it is at."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()

    def _next(self) -> tuple[str, Copy] | None:
        with self.changed:
            while not self._stopped:
                for stream, queue in self._queues.items():
                    if queue and all(self.reached(mark) for mark in queue[0][1]):
                        return stream, queue.popleft()[0]
                self.changed.wait()
        return None

    def _copy(self, stream: str, copy: Copy) -> None:
        source, target = self._ends[copy.kind]
        start = time.perf_counter()
        target[copy.target] = source[copy.source]
        busy = time.perf_counter() - start
        with self.changed:
            self.moved[stream] += source[copy.source].nbytes
            self.busy[stream] += busy
            self._finished[stream] += 1
            self.changed.notify_all()


def _end(worker: _Worker, thread: threading.Thread) -> None:
    """End the thread and wait for it: one that is still there when Python exits can crash that."""
    worker.stop()
    if thread is not threading.current_thread():
        thread.join(EXIT_S)


class StreamDevice:
    """A `copier.Device` on a GPU: "save" and "load" are side streams beside the current one."""

    def __init__(self, cache: torch.Tensor, slab: torch.Tensor) -> None:
        self._ends = {"load": (slab, cache), "save": (cache, slab)}
        self._gpu = cache.device
        self._side = {stream: cuda.Stream(self._gpu) for stream in DIRECTIONS}
        self._timed: dict[str, deque[tuple[Any, Any]]] = {s: deque() for s in DIRECTIONS}
        self._moved = dict.fromkeys(DIRECTIONS, 0)
        self._busy = dict.fromkeys(DIRECTIONS, 0.0)

    def record(self, stream: str) -> Any:
        """Return an event: all work that has been queued on the stream so far."""
        return self._stream(stream).record_event()

    def wait(self, stream: str, event: Any) -> None:
        """Let work that is queued on the stream from now on start after the event."""
        self._stream(stream).wait_event(event)

    def copy(self, stream: str, copy: Copy) -> None:
        """Queue one block copy."""
        source, target = self._ends[copy.kind]
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        with cuda.stream(self._stream(stream)):
            start.record()
            target[copy.target].copy_(source[copy.source], non_blocking=True)
            end.record()
        self._timed[stream].append((start, end))

    def done(self, event: Any) -> bool:
        """Return whether the event's work has ended."""
        return bool(event.query())

    def block(self, events: Sequence[Any], timeout_s: float) -> None:
        """Return when one of the events is done, at the latest after the timeout."""
        until = time.perf_counter() + timeout_s
        while not any(event.query() for event in events) and time.perf_counter() < until:
            time.sleep(POLL_S)

    def traffic(self) -> Traffic:
        """Return what was copied, and the seconds that copying took."""
        record = self._ends["save"][0][0].nbytes
        for stream, timed in self._timed.items():
            while timed and timed[0][1].query():
                start, end = timed.popleft()
                self._moved[stream] += record
                self._busy[stream] += start.elapsed_time(end) / 1000
        moved, busy = self._moved, self._busy
        return Traffic(moved["save"], busy["save"], moved["load"], busy["load"])

    def _stream(self, stream: str) -> Any:
        return self._side.get(stream) or cuda.current_stream(self._gpu)


def _clear_error(gpu: torch.device) -> None:
    """Take the pending error of a refused call, which the next kernel would be blamed for."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=gpu)
