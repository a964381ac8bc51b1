"""What both shells need of httpx: how to connect, and its answers as the core's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import httpx

from agentserve.client.core import Reply, Send, Unreachable

CONNECT_TIMEOUT_S = 10.0
STREAM_SILENCE_S = 60.0  # the server pings every 15 s: a stream this quiet is lost


class ConnectionOptions(TypedDict):
    """Arguments of httpx.Client and httpx.AsyncClient."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx.Timeout
    trust_env: bool


def connection_options(url: str, api_key: str | None, timeout_s: float) -> ConnectionOptions:
    """Return how to reach `url`; a server on this machine is never reached through a proxy.

    Raises ValueError when `url` is no HTTP address.
    """
    address = httpx.URL(url)
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError(f"{url!r} is no address such as http://127.0.0.1:8000")
    local = address.host in ("localhost", "127.0.0.1", "::1")
    return {
        "base_url": url,
        "headers": {"authorization": f"Bearer {api_key}"} if api_key else {},
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        "trust_env": not local,
    }


def request_options(effect: Send) -> dict[str, Any]:
    """Return arguments for build_request."""
    options: dict[str, Any] = {
        "method": effect.method,
        "url": effect.path,
        "content": effect.body,
        "headers": effect.headers,
    }
    if effect.stream:
        options["timeout"] = httpx.Timeout(STREAM_SILENCE_S, connect=CONNECT_TIMEOUT_S)
    return options


def reply_of(response: httpx.Response, stream: Any = None) -> Reply:
    """Return the answer as the core sees it."""
    body = b"" if stream is not None else response.content
    return Reply(response.status_code, dict(response.headers), body, stream)


@contextmanager
def lost_connections(url: httpx.URL) -> Iterator[None]:
    """Turn what httpx raises for a lost or refused connection to `url` into ConnectionError."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.LocalProtocolError):
        raise
    except httpx.TransportError as error:
        kind = type(error).__name__
        message = f"no answer from {str(url).rstrip('/')} ({str(error) or kind})"
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            spent_s = CONNECT_TIMEOUT_S if isinstance(error, httpx.ConnectTimeout) else 0.0
            hint = "is `agentserve serve` running there?"
            raise Unreachable(f"{message}; {hint}", spent_s) from None
        raise ConnectionError(message) from None
