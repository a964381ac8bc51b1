"""What a request says of the session that it belongs to, the surest first.

Every signal is only a hint: the conversation itself decides (`resolve`).
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from agentserve.dialects.asked import Signal

MAX_LENGTH = 256
EXPLICIT = "session_id"
_OWN_HEADERS = ("x-agentserve-session", "x-session-id")
_VENDOR_HEADERS = (
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-litellm-session-id",
    "x-dynamo-session-id",
    "x-grok-conv-id",
)
_CODEX_HEADERS = ("session-id", "thread-id")
_AGENT_HEADERS = ("x-claude-code-agent-id",)
_ANY_SESSION = re.compile(r"x-.+-session-id")
_PARENT = re.compile(r"parent")
_VALUE = re.compile(r"[A-Za-z0-9_-]{8,}")
_CLAUDE_USER = re.compile(r"_session_([0-9a-fA-F-]{8,})$")


def from_headers(headers: Mapping[str, str]) -> list[Signal]:
    """Return the signals in request headers (names in lower case)."""
    found = [Signal(EXPLICIT, headers[name]) for name in _OWN_HEADERS if headers.get(name)]
    agent = "".join(f"/{headers[name]}" for name in _AGENT_HEADERS if headers.get(name))
    named = [name for name in _VENDOR_HEADERS if headers.get(name)]
    if "codex" in (headers.get("originator", "") + headers.get("user-agent", "")).lower():
        named += [name for name in _CODEX_HEADERS if headers.get(name)]
    named += [
        name
        for name, value in headers.items()
        if _ANY_SESSION.fullmatch(name)
        and name not in named
        and name not in _OWN_HEADERS
        and not _PARENT.search(name)
        and _VALUE.fullmatch(value)
    ]
    found += [Signal("header", f"{name}={headers[name]}{agent}") for name in named]
    return _bounded(found)


def from_metadata(metadata: Any) -> list[Signal]:
    """Return the signals in the `metadata` of a body, as OpenAI and Anthropic clients fill it."""
    if not isinstance(metadata, dict):
        return []
    session = metadata.get("session_id")
    if not isinstance(session, str):
        session = _claude_session(metadata.get("user_id"))
    return _bounded([Signal("metadata", session)]) if session else []


def _claude_session(user: Any) -> str | None:
    if not isinstance(user, str):
        return None
    try:
        fields = msgspec.json.decode(user)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        match = _CLAUDE_USER.search(user)
        return match[1] if match else None
    session = fields.get("session_id") if isinstance(fields, dict) else None
    return session if isinstance(session, str) else None


def from_body(session_id: Any, prompt_cache_key: Any) -> tuple[list[Signal], list[Signal]]:
    """Return the signals of two fields of a body, the surest kind apart from the other."""
    explicit = [Signal(EXPLICIT, session_id)] if isinstance(session_id, str) else []
    cache = [Signal("cache_key", prompt_cache_key)] if isinstance(prompt_cache_key, str) else []
    return _bounded(explicit), _bounded(cache)


def _bounded(signals: list[Signal]) -> list[Signal]:
    return [signal for signal in signals if 0 < len(signal.value) <= MAX_LENGTH]
