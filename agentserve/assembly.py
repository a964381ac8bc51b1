"""Where concrete classes meet: model directory -> engine link -> sessions -> ASGI app.

Never imports torch: the engine's runner is named by a string, and with the default engine process
it is imported only there.
"""

import logging
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette

from agentserve.clock import SystemClock
from agentserve.config import EngineSettings, ModelSettings, ServerSettings
from agentserve.engine.process import ProcessLink
from agentserve.engine.supervise import SupervisedLink
from agentserve.engine.thread import ThreadLink
from agentserve.model.prepare import prepare
from agentserve.server.app import create_app
from agentserve.sessions.service import SessionService
from agentserve.sessions.store import MemoryStore
from agentserve.sessions.text import ModelText, model_text
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import choose

log = logging.getLogger(__name__)

TORCH_FACTORY = "agentserve.model.build:build_torch"


@dataclass(frozen=True)
class Backend:
    """Which engine: the factory of its runner ("module:function"), its options, its form."""

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    in_process: bool = False


@dataclass(frozen=True)
class Assembly:
    """A server that is put together and not started: the app's lifespan starts the engine."""

    name: str
    link: SupervisedLink
    service: SessionService
    app: Starlette


def torch_backend(settings: ModelSettings, *, in_process: bool = False) -> Backend:
    """Return the backend that runs the model of `settings` on torch."""
    return Backend(TORCH_FACTORY, msgspec.to_builtins(settings), in_process)


def load_text(directory: Path, name: str, tool_format: str = "auto") -> ModelText:
    """Load the text side of the model in a prepared directory, to be served as `name`.

    `tool_format` names the form of its tool calls; "auto" takes it from the chat template. Raises
    ValueError when there is no such form or the tokenizer or template cannot be used.
    """
    tokenizer = Tokenizer.load(directory)
    form = choose(tool_format, tokenizer.chat_template)
    return model_text(name, tokenizer, form)


def assemble(
    directory: Path,
    backend: Backend,
    server: ServerSettings | None = None,
    engine: EngineSettings | None = None,
) -> Assembly:
    """Put a server together from a prepared model directory.

    Raises ValueError when the server would be open to the network without a key.
    """
    server = server or ServerSettings()
    clock = SystemClock()
    form = ThreadLink if backend.in_process else ProcessLink
    link = form(backend.factory, backend.options, engine or EngineSettings(), clock)
    text = load_text(directory, server.model_name, server.tool_format)
    log.info("tool calls: %s", describe(text, server.tool_format))
    store = MemoryStore(server.store_bytes)
    service = SessionService(link, text, store, server, clock, random.SystemRandom())
    return Assembly(text.name, link, service, create_app(service, server, clock))


def describe(text: ModelText, tool_format: str) -> str:
    """Return which form tool calls have, and why."""
    if tool_format != "auto":
        return f"{text.format.name} (as asked)"
    if text.format.native:
        return f"{text.format.name} (by the chat template)"
    return f"{text.format.name} (the chat template has none of the known forms: bare JSON)"


def build_app(
    model: str,
    server: ServerSettings | None = None,
    engine: EngineSettings | None = None,
    *,
    in_process: bool = False,
    **options: Any,
) -> Starlette:
    """Return the app that serves `model` (anything that `prepare` takes).

    options: fields of ModelSettings other than `directory`.
    """
    directory = prepare(model)
    settings = ModelSettings(directory=str(directory), **options)
    return assemble(directory, torch_backend(settings, in_process=in_process), server, engine).app
