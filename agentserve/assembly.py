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
from agentserve.model.spec import load_spec
from agentserve.server.app import create_app
from agentserve.sessions.script import Script, ScriptFile, read_script
from agentserve.sessions.service import SessionService
from agentserve.sessions.store import MemoryStore
from agentserve.sessions.text import ModelText, model_text
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import choose

log = logging.getLogger(__name__)

TORCH_FACTORY = "agentserve.model.build:build_torch"
SCRIPTED_FACTORY = "agentserve.engine.oracle:build_oracle"
SCRIPTED_BLOCK = 16  # tokens
SCRIPTED_KV = 1 << 18  # tokens of device KV, at least; cells of the scripted engine are small


@dataclass(frozen=True)
class Backend:
    """Which engine: the factory of its runner ("module:function"), its options, its form.

    With a script the server dictates what it generates.
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    in_process: bool = False
    script: ScriptFile | None = None


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


def scripted_backend(directory: Path, path: Path, *, in_process: bool = False) -> Backend:
    """Return the backend that says what the script in the file `path` says.

    directory: a prepared model, for its vocabulary and context. Raises ScriptError.
    """
    script = read_script(path)
    spec = load_spec(directory)
    context = script.context or spec.max_context
    options = {
        "vocab_size": spec.vocab_size,
        "block_size": SCRIPTED_BLOCK,
        "num_blocks": max(SCRIPTED_KV, 4 * context) // SCRIPTED_BLOCK,
        "max_context": context,
    }
    return Backend(SCRIPTED_FACTORY, options, in_process, script)


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
    text: ModelText | None = None,
) -> Assembly:
    """Put a server together from a prepared model directory, whose `text` may be loaded already.

    Raises ValueError when the server would be open to the network without a key, and ScriptError
    when the model has no form for what a script says.
    """
    server = server or ServerSettings()
    clock = SystemClock()
    form = ThreadLink if backend.in_process else ProcessLink
    link = form(backend.factory, backend.options, engine or EngineSettings(), clock)
    text = text or load_text(directory, server.model_name, server.tool_format)
    log.info("tool calls: %s", describe(text, server.tool_format))
    store = MemoryStore(server.store_bytes)
    script = Script(backend.script, text) if backend.script is not None else None
    service = SessionService(link, text, store, server, clock, random.SystemRandom(), script)
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
