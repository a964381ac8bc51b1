"""Who may talk to the server: host and origin checks against DNS rebinding, then API keys."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentserve.config import ServerSettings
from agentserve.errors import Forbidden, Unauthorized

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/health"})
LOCAL_PRINCIPAL = "local"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(settings: ServerSettings) -> None:
    """Raise ValueError when the server would be open to the network without a key."""
    if not settings.api_keys and not is_loopback(settings.host):
        raise ValueError(f"binding to {settings.host} needs an API key; 127.0.0.1 does not")


class Keyring:
    """The API keys, kept as SHA-256 digests. Without any key everyone is "local"."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def principal(self, headers: Headers) -> str:
        """Return whose key was sent. Raises Unauthorized, alike for a missing and a wrong key."""
        if not self._digests:
            return LOCAL_PRINCIPAL
        sent = _digest(_sent_key(headers))
        matches = [hmac.compare_digest(sent, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized("send a valid key as `Authorization: Bearer` or `x-api-key`")
        return f"key-{sent.hex()[:32]}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _sent_key(headers: Headers) -> str:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return headers.get("x-api-key", "")


class HostGuard:
    """Refuses requests that a web page could make by rebinding a name to this machine."""

    def __init__(self, settings: ServerSettings) -> None:
        self._local_only = is_loopback(settings.host)
        self._names = LOOPBACK_NAMES | {settings.host.lower()}

    def check(self, headers: Headers) -> None:
        """Raise Forbidden for a foreign Host (when bound to loopback) or a foreign Origin."""
        host = _hostname("//" + headers.get("host", ""))
        if self._local_only and host not in self._names:
            raise Forbidden("this server answers only to its local names")
        origin = headers.get("origin")
        if origin is None:
            return
        allowed = self._names if self._local_only else {host}
        if _hostname(origin) not in allowed:
            raise Forbidden("requests from other web origins are refused")


def _hostname(url: str) -> str:
    """Return the lower-case host of `url`, without port and brackets; "" when there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


class Gate:
    """ASGI middleware: lets a request through with its principal as `request.user`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._guard = HostGuard(settings)
        self._keys = Keyring(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, then run the app below. Raises Forbidden and Unauthorized."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._guard.check(headers)
            if scope["path"] not in OPEN_PATHS:
                scope["user"] = self._keys.principal(headers)
        await self._app(scope, receive, send)
