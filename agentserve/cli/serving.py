"""`agentserve serve`: bind, load, announce, serve, drain."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import uvicorn

from agentserve.assembly import Assembly
from agentserve.cli.options import CommandFailed, format_size
from agentserve.config import COLLECT_EVERY

DRAIN_S = 8.0  # what the sessions take for themselves, and some more
GRACE_S = 3
SHUTDOWN_S = 10.0
POLL_S = 0.05


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, before the slow work of loading a model begins.

    Raises CommandFailed when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise CommandFailed(
            f"cannot listen on {host} port {port} ({error}); choose another --host or --port"
        ) from None


def run(assembly: Assembly, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once.

    `announce` gets one line when the engine is ready. Raises CommandFailed when it cannot start.
    """
    config = uvicorn.Config(
        assembly.app,
        ws="none",
        http="h11",  # bounds the size of headers, which httptools does not
        loop="auto",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(_Server(config), assembly, listener, announce))


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`, which drains the sessions first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _serve(
    server: _Server,
    assembly: Assembly,
    listener: socket.socket,
    announce: Callable[[str], None],
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        server.force_exit = stop.is_set()
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        if await _until_ready(assembly, serving, stop):
            gc.freeze()  # else each full collection walks all that was imported: 12 ms
            gc.set_threshold(COLLECT_EVERY)
            announce(_ready_line(assembly, listener))
            await _first(serving, stop.wait())
            await _first(assembly.service.drain(), hurry.wait(), at_most_s=DRAIN_S)
        if not stop.is_set():
            raise CommandFailed("the server ended by itself; the log says why")
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=SHUTDOWN_S)
        await assembly.link.close()
        if not serving.done():
            serving.cancel()  # the engine hangs, and with it a turn that cannot end
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _first(
    *waits: "Coroutine[Any, Any, Any] | asyncio.Task[None]", at_most_s: float | None = None
) -> None:
    """Wait until one of `waits` is done; coroutines are cancelled then, tasks go on."""
    own = [asyncio.create_task(wait) for wait in waits if not isinstance(wait, asyncio.Task)]
    tasks = {*own, *(wait for wait in waits if isinstance(wait, asyncio.Task))}
    await asyncio.wait(tasks, timeout=at_most_s, return_when=asyncio.FIRST_COMPLETED)
    for task in own:
        task.cancel()
    await asyncio.gather(*own, return_exceptions=True)


async def _until_ready(
    assembly: Assembly, serving: "asyncio.Task[None]", stop: asyncio.Event
) -> bool:
    """Wait for the engine; False when the server ends or is told to before that."""
    while not (serving.done() or stop.is_set()):
        if assembly.link.failure is not None:
            raise CommandFailed(f"{assembly.link.failure}; `agentserve doctor` may say why")
        ready, _ = assembly.service.ready()
        if ready:
            return True
        await asyncio.sleep(POLL_S)
    return False


def _ready_line(assembly: Assembly, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    info = assembly.link.info
    if info is None:
        return f"agentserve is ready: {url}"
    tokens = info.num_blocks * info.block_size
    size = info.num_blocks * sum(group.block_bytes for group in info.groups)
    host_tokens = info.host_blocks * info.block_size
    return (
        f"agentserve is ready: {url}  model {assembly.name} ({info.dtype}, {info.device})  "
        f"context {info.max_context} tokens  KV {tokens} tokens ({format_size(size)}), "
        f"and {host_tokens} in the host tier"
    )
