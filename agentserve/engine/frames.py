"""Frames of the engine seam: a 4-byte little-endian length, then one msgpack value.

Sans-IO: the decoder is fed whatever a socket gave and returns the values that are complete.
"""

import struct
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024

_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class FrameError(ValueError):
    """The peer sent bytes that are not a frame of the agreed shape; the connection is useless."""


def encode_frame(value: Any) -> bytes:
    """Return `value` as one frame.

    Raises FrameError when it is larger than MAX_FRAME_BYTES.
    """
    body = _encoder.encode(value)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


class FrameDecoder(Generic[T]):
    """Turns a byte stream, split anywhere, into values of one shape."""

    def __init__(self, shape: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(shape)
        self._max = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Take more bytes and return the values that they complete, in order.

        Raises FrameError on a length over the limit, before its body has arrived, and on a body
        that is not a msgpack value of the shape.
        """
        self._buffer += data
        values: list[T] = []
        start = 0
        while (end := self._frame_end(start)) is not None:
            values.append(self._decode(bytes(self._buffer[start + _HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return values

    def _frame_end(self, start: int) -> int | None:
        """Return where the frame at `start` ends, None while a part of it is missing."""
        if len(self._buffer) - start < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer, start)
        if length > self._max:
            raise FrameError(f"a frame of {length} bytes is over the limit of {self._max}")
        end: int = start + _HEADER.size + length
        return end if end <= len(self._buffer) else None

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"malformed frame: {error}") from None
