"""The engine's end of the socket to its parent: the thread that steps reads and sends by itself.

Each hand-over between threads costs a turn a tenth of a millisecond. So only what has to happen
during a step has threads of its own: the end of this process when the parent goes away, and the
sending of what the socket did not take at once.
"""

import contextlib
import os
import select
import socket
import sys
import threading
from collections import deque

from agentserve.engine.drive import EngineSpec, joins
from agentserve.engine.frames import FrameDecoder, FrameError, encode_frame
from agentserve.engine.messages import Command, Event

_READ_BYTES = 256 * 1024


class SocketInbox:
    """Commands from the parent. When it goes away this process ends, even in the middle of a step.

    `wake` may be called from any thread, all else is the engine's.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._decoder: FrameDecoder[EngineSpec | Command] = FrameDecoder(EngineSpec | Command)
        self._early: list[EngineSpec | Command] = []
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._arrivals = select.poll()
        self._arrivals.register(channel, select.POLLIN)
        self._arrivals.register(self._woken, select.POLLIN)
        threading.Thread(target=_leave_with, args=(channel,), name="parent", daemon=True).start()

    def spec(self) -> EngineSpec:
        """Wait for the first frame; what came with it is taken later."""
        first: list[EngineSpec | Command] = []
        while not first:
            first = self._feed(self._receive(0))
        if not isinstance(first[0], EngineSpec):
            sys.exit("the first frame is not an engine spec")
        self._early = first[1:]
        return first[0]

    def wake(self) -> None:
        """Wake the engine without a command."""
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._waker.send(b"\0")

    def take(self, timeout: float) -> list[Command] | None:
        """Return the commands that have come; wait up to `timeout` seconds for one."""
        if timeout > 0 and not self._early:
            ready = self._arrivals.poll(timeout * 1000)
            if any(descriptor == self._woken.fileno() for descriptor, _ in ready):
                self._woken.recv(_READ_BYTES)
        commands, self._early = self._early, []
        with contextlib.suppress(BlockingIOError):
            commands += self._feed(self._receive(socket.MSG_DONTWAIT))
        return [one for one in commands if not isinstance(one, EngineSpec)]

    def _receive(self, flags: int) -> bytes:
        try:
            data = self._channel.recv(_READ_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        return data

    def _feed(self, data: bytes) -> "list[EngineSpec | Command]":
        try:
            return self._decoder.feed(data)
        except FrameError as error:
            sys.stderr.write(f"engine: the server process sent a {error}\n")
            os._exit(2)


class SocketOutbox:
    """Event batches to the parent: sent at once, and by a thread while the socket is full."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._waiting: deque[bytes] = deque()
        self._pending = threading.Semaphore(0)
        self._sender = threading.Thread(target=self._send_rest, name="sender", daemon=True)
        self._sender.start()

    def put(self, batch: list[Event]) -> None:
        """Send a batch that `joins` the others. Raises ReaderStalled."""
        if joins(batch, len(self._waiting)):
            self.put_last(batch)

    def put_last(self, batch: list[Event]) -> None:
        """Send a batch, or queue what is left of it, however full the queue is."""
        frame = encode_frame(batch)
        if not self._waiting:
            with contextlib.suppress(BlockingIOError):
                frame = frame[self._send(frame, socket.MSG_DONTWAIT) :]
        if frame:
            self._queue(frame)

    def flush(self, timeout: float) -> None:
        """Wait until all is sent; nothing can be put afterwards."""
        self._queue(b"")
        self._sender.join(timeout)

    def _queue(self, frame: bytes) -> None:
        self._waiting.append(frame)
        self._pending.release()

    def _send_rest(self) -> None:
        while self._pending.acquire():
            frame = self._waiting[0]
            if not frame:
                return
            while frame:
                frame = frame[self._send(frame, 0) :]
            self._waiting.popleft()  # only now: while anything waits nobody else sends

    def _send(self, frame: bytes, flags: int) -> int:
        try:
            return self._channel.send(frame, flags)
        except BlockingIOError:
            raise
        except OSError:
            os._exit(0)


def _leave_with(parent: socket.socket) -> None:
    """End this process when the other end is closed, whatever is still to be read."""
    gone = select.poll()
    gone.register(parent, 0)  # it tells of a hang-up in any case
    gone.poll()
    os._exit(0)
