"""gRPC's message framing: length-prefixed messages in the data of a stream, compressed or not (gRPC over HTTP/2)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np

from gateway.grpc.status import CallError, Status

PREFIX_BYTES = 5
"""One byte that tells whether the message is compressed, and four with its length."""

MAX_EXPANDED_BYTES = 256 * 1024 * 1024
"""The largest message that a compressed one may become: a thousandth of it can be asked to become so."""

Message = bytes | memoryview
"""A message; a large one is a view over what was received."""

_WINDOW_BITS = {"gzip": 31, "deflate": 15}

ENCODINGS = frozenset(["identity", *_WINDOW_BITS])
"""The values of `grpc-encoding` that are known."""


def message_prefix(length: int) -> bytes:
    """What goes before a message of `length` bytes that is not compressed."""
    return b"\0" + length.to_bytes(4, "big")


class MessageReader:
    """Puts the messages of one stream together.

    `encoding` is the request's; `limit` bounds, in bytes, each message. `admit` is told the length of each before there
    is room for it, and raises CallError where there is to be none.
    """

    __slots__ = ("_admit", "_body", "_encoding", "_filled", "_limit", "_prefix")

    def __init__(self, encoding: str, limit: int, admit: Callable[[int], None]) -> None:
        self._admit = admit
        self._body: memoryview | None = None
        self._encoding = encoding
        self._filled = 0
        self._limit = limit
        self._prefix = b""

    @property
    def is_between_messages(self) -> bool:
        """Whether nothing of a message waits for its rest."""
        return not self._prefix

    def feed(self, data: bytes | memoryview) -> Iterator[Message]:
        """The messages that `data` completes. Raises CallError for one that is too large or malformed."""
        rest = memoryview(data)
        while rest:
            if self._body is None:
                missing = PREFIX_BYTES - len(self._prefix)
                self._prefix += rest[:missing]
                rest = rest[missing:]
                if len(self._prefix) < PREFIX_BYTES:
                    return
                self._body = self._room_for_message()
            part = rest[: len(self._body) - self._filled]
            self._body[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == len(self._body):
                flag, body = self._prefix[0], self._body
                self._prefix, self._body, self._filled = b"", None, 0
                yield self._message(flag, body)

    def _room_for_message(self) -> memoryview:
        length = int.from_bytes(self._prefix[1:], "big")
        if length > self._limit:
            raise _too_large(length, self._limit)
        self._admit(length)
        # Memory that is not written to costs nothing, so it can be had at once: growing costs more than all the rest.
        return np.empty(length, np.uint8).data

    def _message(self, flag: int, data: memoryview) -> Message:
        if not flag:
            return data
        window_bits = _WINDOW_BITS.get(self._encoding)
        if flag != 1 or window_bits is None:
            raise CallError(Status.INTERNAL, "a message is compressed, but not in the way that the call announced")
        return _decompress(data, window_bits, min(self._limit, MAX_EXPANDED_BYTES))


def _decompress(data: memoryview, window_bits: int, limit: int) -> bytes:
    inflater = zlib.decompressobj(window_bits)
    try:
        message = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise CallError(Status.INTERNAL, "a message can't be decompressed") from error
    if len(message) > limit:
        raise _too_large(len(message), limit)
    if not inflater.eof or inflater.unused_data:
        raise CallError(Status.INTERNAL, "a message can't be decompressed")
    return message


def _too_large(length: int, limit: int) -> CallError:
    return CallError(Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")
