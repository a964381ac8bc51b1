"""`agentserve serve` with a scripted engine as a process, and what it says of its sessions."""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

READY = re.compile(r"agentserve is ready: (http://\S+)")
SIGNAL = re.compile(r'^agentserve_session_resolution_total\{signal="(\w+)"\} (\d+)', re.M)


class ServerProcess:
    """A server that says what a script says, on a free port, ended with the `with` block."""

    def __init__(self, script: Path) -> None:
        self._script = script

    def __enter__(self) -> "ServerProcess":
        """Start it. Raises RuntimeError when it does not become ready."""
        command = [sys.executable, "-m", "agentserve", "serve", "--port", "0"]
        command += ["--engine", f"thread+scripted:{self._script}"]
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = READY.search(line)
        if found is None:
            reason = self.errors()
            self.__exit__(None, None, None)
            raise RuntimeError(f"the server did not start: {line}{reason}")
        self.url = found[1]
        self._http = httpx.Client(base_url=self.url, timeout=30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def errors(self) -> str:
        """Return what it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns that generated, also those off the path; the oldest session first.

        Their ids are unique among sessions. A turn that a fork has inherited is the original.
        """
        sessions = self._get("/sessions", limit="100")["sessions"]
        sessions.sort(key=lambda session: session["created_at"])
        made: dict[str, dict[str, Any]] = {}
        names: dict[tuple[str, str | None], str] = {}
        for session in (one["id"] for one in sessions):
            for turn in self._generated(session):
                own = (session, turn["id"])
                content = json.dumps([turn["id"], turn["output"], turn["timing_ms"]])
                known = made.setdefault(content, turn)
                names[own] = known["id"] if known is not turn else "/".join(own)
                turn["previous"] = names.get((session, turn["previous"]))
                turn["id"] = names[own]
        return list(made.values())

    def _generated(self, session: str) -> list[dict[str, Any]]:
        turns = []
        for number in range(1, 1000):
            answer = self._http.get(f"/sessions/{session}/turns/t_{number}")
            if answer.status_code == 404:
                break
            turn = answer.raise_for_status().json()
            if turn["usage"]["output_tokens"]:  # others were imported
                turns.append(turn)
        return turns

    def signals(self) -> dict[str, int]:
        """Return how often each signal found the session of a request."""
        text = self._http.get("/metrics").raise_for_status().text
        counts = Counter({name: int(count) for name, count in SIGNAL.findall(text)})
        return dict(+counts)

    def _get(self, path: str, **query: str) -> Any:
        return self._http.get(path, params=query).raise_for_status().json()
