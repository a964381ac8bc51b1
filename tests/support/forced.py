"""Dictates what a real server's model says: each turn gets the next output of a script."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from live_server import serving
from served import assembled, open_client, wait_until_ready
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentserve.config import ServerSettings


class Forced:
    """An ASGI app in front of a server that allows forced outputs (API.md, rule 15).

    The turns of one session come one after the other, so a script is used by one session.
    """

    def __init__(self, app: ASGIApp, script: list[list[dict[str, Any]]]) -> None:
        self._app = app
        self.script = list(script)
        self.posts: list[tuple[str, Any]] = []  # (last part of the path, body), as they were sent

    @property
    def turns(self) -> list[Any]:
        """The bodies of the turns."""
        return [body for action, body in self.posts if action == "turn"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        action = scope["path"].rpartition("/")[2]
        body = msgspec.json.decode(await _whole(receive))
        self.posts.append((action, body))
        if action == "turn" and self.script:
            body = body | {"debug": {"force": self.script.pop(0)}}
        encoded = msgspec.json.encode(body)
        waiting = [{"type": "http.request", "body": encoded, "more_body": False}]
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(encoded)).encode()))

        async def rest() -> Message:
            return waiting.pop() if waiting else await receive()

        return await self._app(scope | {"headers": headers}, rest, send)


async def _whole(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


@contextlib.contextmanager
def forced_server() -> Iterator[tuple[Forced, str]]:
    """Yield the app in front of a server that runs, and its address."""
    front = Forced(assembled(ServerSettings(allow_force=True)).app, [])
    with serving(front) as port:
        with open_client(port, {}) as http:
            wait_until_ready(http)
        yield front, f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def telling(front: Forced) -> Iterator[Callable[..., Forced]]:
    """Yield what sets the model's next turns; `front` then has what is sent from there on."""

    def tell(*turns: list[dict[str, Any]]) -> Forced:
        front.script[:] = turns
        front.posts.clear()
        return front

    yield tell
    left, front.script[:] = list(front.script), []
    assert left == [], "the model was asked less often than the story goes"


def says(text: str) -> list[dict[str, Any]]:
    """Return a turn that answers."""
    return [{"type": "text", "text": text}]


def calls(*named: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a turn that calls tools."""
    return [{"type": "tool_call", "name": name, "arguments": args} for name, args in named]
