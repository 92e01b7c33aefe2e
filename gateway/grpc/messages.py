"""gRPC's message framing: length-prefixed messages in the data of a stream, compressed or not (gRPC over HTTP/2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gateway.grpc.compression import Inflation, too_large
from gateway.grpc.status import CallError, Status

PREFIX_BYTES = 5
"""One byte that tells whether the message is compressed, and four with its length."""

Message = bytes | memoryview
"""A message; a large one is a view over what was received."""


def message_prefix(length: int, flag: int = 0) -> bytes:
    """What goes before a message of `length` bytes; `flag` is 1 for a compressed one."""
    return bytes((flag,)) + length.to_bytes(4, "big")


class MessageReader:
    """Puts the messages of one stream together.

    `encoding` is the request's; `limit` bounds, in bytes, each message. `admit` is told the length of each before its
    content arrives, and `arrive` how much of it takes up memory, and its length, whenever some has arrived; both raise
    CallError where the message is refused.
    """

    __slots__ = ("_admit", "_arrive", "_body", "_encoding", "_filled", "_limit", "_prefix")

    def __init__(
        self, encoding: str, limit: int, admit: Callable[[int], None], arrive: Callable[[int, int], None]
    ) -> None:
        self._admit = admit
        self._arrive = arrive
        self._body: memoryview | None = None
        self._encoding = encoding
        self._filled = 0
        self._limit = limit
        self._prefix = b""

    @property
    def is_between_messages(self) -> bool:
        """Whether nothing of a message waits for its rest."""
        return not self._prefix

    @property
    def filled_bytes(self) -> int:
        """How much of the unfinished message has arrived."""
        return self._filled

    def feed(self, data: bytes | memoryview) -> Iterator[Message | Inflation]:
        """The messages that `data` completes. Raises CallError for one that is too large or malformed.

        A compressed one that takes long to expand comes as it is, to be expanded elsewhere.
        """
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
            self._arrive(self._filled, len(self._body))
            rest = rest[len(part) :]
            if self._filled == len(self._body):
                flag, body = self._prefix[0], self._body
                self._prefix, self._body, self._filled = b"", None, 0
                yield self._message(flag, body)

    def _room_for_message(self) -> memoryview:
        length = int.from_bytes(self._prefix[1:], "big")
        if length > self._limit:
            raise too_large(length, self._limit)
        self._admit(length)
        # Memory that is not written to costs nothing, so it can be had at once: growing costs more than all the rest.
        return np.empty(length, np.uint8).data

    def _message(self, flag: int, data: memoryview) -> Message | Inflation:
        if not flag:
            return data
        if flag != 1:
            raise CallError(Status.INTERNAL, "a message has a flag that is not known")
        inflation = Inflation(data, self._encoding, self._limit)
        message = inflation.run_if_short()
        return inflation if message is None else message
