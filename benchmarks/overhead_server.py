"""`python overhead_server.py DIRECTORY`: `agentserve serve` on the constant runner, with stamps.

SmolLM2's tokenizer and template, uvicorn, sockets and the engine process are those of `serve`. For
each turn a line of JSON goes to DIRECTORY/stamps.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec
from overhead_engine import SharedClock, StepTimes
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentserve.assembly import Backend, assemble, load_text
from agentserve.cli.serving import listen, run
from agentserve.config import ServerSettings
from agentserve.model.prepare import prepare
from agentserve.replay.generator import TOOL, WORDS
from agentserve.wire import ToolCall

CALL = ToolCall(TOOL.name, {"topic": " ".join(WORDS[:8])})  # every answer
STEP_HEADER = b"step-seconds"  # of a request: how long the steps of its turn take


class Stamps(msgspec.Struct, frozen=True):
    """One turn in the server, in time.perf_counter seconds."""

    called: float  # the application, with the request's head
    received: float  # the last byte of the body
    first_event: float  # sent
    last_byte: float  # sent
    steps: StepTimes


class Stamped:
    """An ASGI application that notes when requests for turns come and when answers go."""

    def __init__(self, app: ASGIApp, clock: SharedClock, file: IO[bytes]) -> None:
        self._app = app
        self._clock = clock
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        if scope["type"] != "http" or not scope["path"].endswith("/turn"):
            await self._app(scope, receive, send)
            return
        called, received, first_event = time.perf_counter(), 0.0, 0.0
        step_s = float(dict(scope["headers"]).get(STEP_HEADER, 0.0))

        async def stamped_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                received = time.perf_counter()
                self._clock.reset(step_s)
            return message

        async def stamped_send(message: Message) -> None:
            nonlocal first_event
            await send(message)
            now = time.perf_counter()
            if not first_event and message.get("body"):
                first_event = now
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._write(Stamps(called, received, first_event, now, self._clock.read()))

        await self._app(scope, stamped_receive, stamped_send)

    def _write(self, stamps: Stamps) -> None:
        self._file.write(msgspec.json.encode(stamps) + b"\n")
        self._file.flush()


def main() -> None:
    """Serve on a free port until SIGTERM."""
    place = Path(sys.argv[1])
    directory = prepare("smollm2-135m")
    text = load_text(directory, "smollm2-135m")
    answer = text.tokenizer.encode_text(text.format.emit([CALL]))
    options: dict[str, Any] = {
        "directory": str(directory),
        "clock": str(place / "clock"),
        "answer": [*answer, text.tokenizer.stop_ids[0]],
    }
    clock = SharedClock(place / "clock")
    backend = Backend("overhead_engine:build", options)
    assembly = assemble(directory, backend, ServerSettings(), text=text)
    with listen("127.0.0.1", 0) as listener, (place / "stamps").open("wb") as file:
        stamped: Any = Stamped(assembly.app, clock, file)
        run(dataclasses.replace(assembly, app=stamped), listener, say)


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
