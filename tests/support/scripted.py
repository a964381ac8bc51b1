"""A server whose model says what a test wants, on a real socket: everything else is real."""

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from live_server import serving
from served import open_client, wait_until_ready
from text_models import qwen3, smollm

from agentserve.assembly import SCRIPTED_FACTORY, Assembly, Backend, assemble, load_text
from agentserve.config import EngineSettings, ServerSettings
from agentserve.sessions.script import ScriptAnswer, ScriptFile
from agentserve.sessions.text import ModelText

WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
        "required": ["city"],
    },
}


def said(text: str, **due: Any) -> dict[str, Any]:
    """Return an answer of a script."""
    return {"text": text, **due}


def called(*cities: str, text: str = "", thought: str = "", **due: Any) -> dict[str, Any]:
    """Return an answer that calls get_weather once for each city."""
    parts: list[dict[str, Any]] = [{"type": "reasoning", "text": thought}] if thought else []
    parts += [{"type": "text", "text": text}] if text else []
    parts += [
        {"type": "tool_call", "name": "get_weather", "arguments": {"city": city}} for city in cities
    ]
    return {"output": parts, **due}


@dataclass(frozen=True)
class Scripted:
    """A running server and a client of it."""

    assembly: Assembly
    port: int
    http: httpx.Client

    @property
    def url(self) -> str:
        """The address."""
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """Send a body; names of headers with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(path, json=body, headers=named)

    def metric(self, name: str) -> float:
        """Return one value of /metrics."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"agentserve_{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def resolved(self) -> dict[str, int]:
        """Return how often each signal resolved a session."""
        counts = {}
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith("agentserve_session_resolution_total{"):
                signal, value = line.split('"')[1], float(line.rpartition(" ")[2])
                if value:
                    counts[signal] = int(value)
        return counts


@contextlib.contextmanager
def scripted(
    *answers: dict[str, Any],
    family: str = "smollm2",
    settings: ServerSettings | None = None,
    key: str | None = None,
    **options: Any,
) -> Iterator[Scripted]:
    """Yield a server that gives these answers; `options` replace those of the engine."""
    directory: Path = {"smollm2": smollm, "qwen3": qwen3}[family]()
    script = ScriptFile([msgspec.convert(answer, ScriptAnswer) for answer in answers])
    text = loaded(directory)
    engine = {
        "vocab_size": len(text.tokenizer._bytes),
        "block_size": 16,
        "num_blocks": 4096,
        "max_context": 16_384,
        "max_slots": 16,
        **options,
    }
    backend = Backend(SCRIPTED_FACTORY, engine, in_process=True, script=script)
    assembly = assemble(directory, backend, settings, EngineSettings(check_invariants=True), text)
    headers = {"x-api-key": key} if key is not None else {}
    with serving(assembly.app) as port, open_client(port, headers) as http:
        wait_until_ready(http)
        yield Scripted(assembly, port, http)


@functools.cache
def loaded(directory: Path) -> ModelText:
    """Return the text side of a model, which takes a second to load."""
    return load_text(directory, ServerSettings().model_name)


def chat_chunks(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream of chat completions, which ends with [DONE]."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream whose names are their types, without pings."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":") or block == "data: [DONE]":
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            events.append(event)
    return events
