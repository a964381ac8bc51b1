"""The engine process: `python -m agentserve.engine FD`, started by engine.process only."""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys

from agentserve.clock import SystemClock
from agentserve.config import COLLECT_EVERY
from agentserve.engine.channel import SocketInbox, SocketOutbox
from agentserve.engine.drive import run_engine

FLUSH_S = 5.0


def main(descriptor: int) -> None:
    """Serve the parent at the other end of socket `descriptor` until it goes away."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(message)s")
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    gc.set_threshold(COLLECT_EVERY)
    inbox, outbox = SocketInbox(channel), SocketOutbox(channel)
    run_engine(inbox.spec(), inbox, outbox, SystemClock())
    outbox.flush(FLUSH_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
