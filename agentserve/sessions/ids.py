"""Identifiers: session ids that cannot be guessed, call ids that carry and sign their origin.

An id is never an authorization: every lookup is made inside the caller's own namespace.
"""

import base64
import hashlib
import hmac
import random
import struct
from typing import NamedTuple

_ORIGIN = struct.Struct(">QIH")  # session tag, turn number, number of the call in its turn
_SIGNATURE_BYTES = 12
_CALL_CHARS = 35
_PREFIX = "call_"


def new_session_id(source: random.Random) -> str:
    """Return a session id with 144 random bits."""
    return "s_" + _b64(source.randbytes(18))


def prompt_call_id(turn: int, index: int) -> str:
    """Return the nine-character id that templates show for a call (Mistral wants exactly nine)."""
    return f"c{turn:05d}{index:03d}"


class CallOrigin(NamedTuple):
    """Where a call id was minted."""

    session_tag: int
    turn: int
    number: int


class CallIds:
    """Mints and reads `call_` ids: 14 bytes of origin and 12 of HMAC-SHA256, 35 characters."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def mint(self, session_tag: int, turn: int, index: int) -> str:
        """Return the id of call number `index` of turn number `turn`."""
        origin = _ORIGIN.pack(session_tag, turn, index)
        return _PREFIX + _b64(origin + self._sign(origin))

    def read(self, call_id: str) -> CallOrigin | None:
        """Return where `call_id` was minted, or None when this server did not mint it."""
        if not call_id.startswith(_PREFIX) or len(call_id) != len(_PREFIX) + _CALL_CHARS:
            return None
        try:
            raw = base64.b64decode(call_id[len(_PREFIX) :] + "=", altchars=b"-_", validate=True)
        except ValueError:
            return None
        origin, signature = raw[: _ORIGIN.size], raw[_ORIGIN.size :]
        if not hmac.compare_digest(signature, self._sign(origin)):
            return None
        return CallOrigin(*_ORIGIN.unpack(origin))

    def _sign(self, origin: bytes) -> bytes:
        return hmac.new(self._key, origin, hashlib.sha256).digest()[:_SIGNATURE_BYTES]


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
