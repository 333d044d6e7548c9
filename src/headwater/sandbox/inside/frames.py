"""Messages between the owner of a sandbox and its processes: a length of four bytes, then JSON."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30


class BrokenFrame(Exception):
    """The other side closed its end in the middle of a message, or sent something that is not a message."""


class FrameReader:
    """Puts one message together from its pieces."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()
        self._length = _LENGTH.size
        self._has_head = False

    @property
    def wants(self) -> int:
        """How many bytes to read next, at most: never more than belong to this message."""
        return min(self._length - len(self._received), 1 << 20)

    @property
    def is_empty(self) -> bool:
        return not self._received and not self._has_head

    def feed(self, piece: bytes) -> dict[str, Any] | None:
        """Add bytes; return the message when it is complete."""
        self._received += piece
        if not self._has_head and len(self._received) == _LENGTH.size:
            (self._length,) = _LENGTH.unpack(self._received)
            self._has_head = True
            self._received.clear()
            if not 0 < self._length <= self._max_bytes:
                raise BrokenFrame(f"a message of {self._length} bytes was announced")
        if not self._has_head or len(self._received) < self._length:
            return None
        try:
            message = json.loads(self._received)
        except ValueError as error:
            raise BrokenFrame(f"the message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise BrokenFrame("the message is not an object")
        return message


def encode(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is too long for the sandbox; {MAX_FRAME_BYTES} are possible")
    return _LENGTH.pack(len(body)) + body


def read(descriptor: int) -> dict[str, Any] | None:
    """Read one message from a blocking descriptor; None if the other side has closed its end."""
    reader = FrameReader()
    while True:
        piece = os.read(descriptor, reader.wants)
        if not piece:
            if reader.is_empty:
                return None
            raise BrokenFrame("the other side ended in the middle of a message")
        if (message := reader.feed(piece)) is not None:
            return message


def write(descriptor: int, message: dict[str, Any]) -> None:
    """Write one message to a blocking descriptor."""
    left = memoryview(encode(message))
    while left:
        left = left[os.write(descriptor, left) :]
