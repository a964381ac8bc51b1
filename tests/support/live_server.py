"""Runs an ASGI app on a real uvicorn socket, in a thread with its own event loop."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Literal

import uvicorn
from starlette.types import ASGIApp


@contextlib.contextmanager
def serving(app: ASGIApp, http: Literal["auto", "h11"] = "auto") -> Iterator[int]:
    """Yield the port that `app` is served on; stops gracefully afterwards."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            app, http=http, log_level="warning", lifespan="on", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join(20)
    if thread.is_alive():
        raise RuntimeError("the server did not stop")
