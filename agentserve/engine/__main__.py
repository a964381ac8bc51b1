"""The engine process: `python -m agentserve.engine FD`, started by engine.process only."""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from agentserve.clock import SystemClock
from agentserve.engine.drive import EngineSpec, Inbox, Outbox, run_engine
from agentserve.engine.frames import FrameDecoder, FrameError, encode_frame
from agentserve.engine.messages import Command, Down

FLUSH_S = 5.0
_READ_BYTES = 256 * 1024


def main(descriptor: int) -> None:
    """Serve the parent at the other end of socket `descriptor` until it goes away."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(message)s")
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    incoming = receive(channel)
    spec = next(incoming)
    if not isinstance(spec, EngineSpec):
        sys.exit("the first frame is not an engine spec")
    inbox = Inbox()
    threading.Thread(target=read, args=(incoming, inbox), name="reader", daemon=True).start()
    pending = threading.Semaphore(0)
    outbox = Outbox(pending.release)
    writer = threading.Thread(
        target=write, args=(channel, outbox, pending), name="writer", daemon=True
    )
    writer.start()
    run_engine(spec, inbox, outbox, SystemClock())
    writer.join(FLUSH_S)
    os._exit(1)


def receive(channel: socket.socket) -> "Iterator[EngineSpec | Command]":
    """Yield what the parent sends. When it goes away this process ends here, even in mid-step."""
    decoder: FrameDecoder[EngineSpec | Command] = FrameDecoder(EngineSpec | Command)
    try:
        while data := channel.recv(_READ_BYTES):
            yield from decoder.feed(data)
    except FrameError as error:
        sys.stderr.write(f"engine: the server process sent a {error}\n")
        os._exit(2)
    except OSError:
        pass
    os._exit(0)


def read(incoming: "Iterator[EngineSpec | Command]", inbox: Inbox) -> None:
    """Carry commands to the engine for as long as the parent is there."""
    for command in incoming:
        if not isinstance(command, EngineSpec):
            inbox.put([command])


def write(channel: socket.socket, outbox: Outbox, pending: threading.Semaphore) -> None:
    """Carry event batches to the parent, up to the engine's Down."""
    while pending.acquire():
        batch = outbox.take()
        if batch is None:
            continue
        try:
            channel.sendall(encode_frame(batch))
        except OSError:
            os._exit(0)
        if isinstance(batch[0], Down):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
