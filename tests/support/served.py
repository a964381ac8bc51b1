"""The whole server on the hash oracle and SmolLM2's real tokenizer, on a real socket."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from live_server import serving

from agentserve.assembly import Assembly, Backend, assemble
from agentserve.config import EngineSettings, ServerSettings
from agentserve.model.prepare import prepare

ORACLE = "served_factories:oracle"
OPTIONS: dict[str, Any] = {
    "vocab_size": 49152,
    "block_size": 16,
    "num_blocks": 1024,
    "max_context": 2048,
    "max_slots": 16,
}


@dataclass(frozen=True)
class Served:
    """A running server and a client of it."""

    assembly: Assembly
    port: int
    http: httpx.Client

    def client(self, **headers: str) -> httpx.Client:
        """Return another client, with these headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return open_client(self.port, named)

    def create(self, **body: Any) -> str:
        """Create a session and return its id."""
        answer = self.http.post("/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def turn(self, session: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
        """Run one turn and return it."""
        body = {"input": text, "max_output_tokens": 4, **fields}
        answer = self.http.post(f"/sessions/{session}/turn", json=body)
        assert answer.status_code == 200, answer.text
        turn: dict[str, Any] = answer.json()
        return turn

    def stream(self, session: str, text: str = "hello", **fields: Any) -> list[dict[str, Any]]:
        """Run one streamed turn and return its events."""
        body = {"input": text, "max_output_tokens": 4, "stream": True, **fields}
        answer = self.http.post(f"/sessions/{session}/turn", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        return parse_events(answer.text)


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the data of each event, with its id as `seq`; checks that names and types agree."""
    events = []
    for block in text.replace(": ping\n\n", "").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        event = json.loads(fields["data"])
        assert event["type"] == fields["event"]
        events.append(event | ({"seq": int(fields["id"])} if "id" in fields else {}))
    return events


def assembled(settings: ServerSettings | None = None, **options: Any) -> Assembly:
    """Return a server that is not started; `options` replace those of the oracle."""
    directory = prepare("smollm2-135m")
    own = {**OPTIONS, "directory": str(directory), **options}
    backend = Backend(ORACLE, own, in_process=True)
    return assemble(directory, backend, settings, EngineSettings(check_invariants=True))


@contextlib.contextmanager
def served(
    settings: ServerSettings | None = None, *, key: str | None = None, **options: Any
) -> Iterator[Served]:
    """Yield a running server; `options` replace those of the oracle."""
    assembly = assembled(settings, **options)
    headers = {"x-api-key": key} if key is not None else {}
    with (
        serving(assembly.app) as port,
        open_client(port, headers) as http,
    ):
        wait_until_ready(http)
        yield Served(assembly, port, http)


def open_client(port: int, headers: dict[str, str]) -> httpx.Client:
    """Return a client; nothing here is encrypted, so no certificates are loaded."""
    url = f"http://127.0.0.1:{port}"
    return httpx.Client(base_url=url, headers=headers, timeout=60, verify=False)


def wait_until_ready(http: httpx.Client) -> None:
    """Poll /ready until the engine is up."""
    for _ in range(3000):
        if http.get("/ready").status_code == 200:
            return
        time.sleep(0.01)
    raise AssertionError(http.get("/ready").text)
