"""Frames of a link: how messages with their subjects lie one behind the other in a stream of bytes. Sans-IO.

A frame is the number of bytes that follow (4 bytes, little-endian), the length of the subject (1 byte), the subject, and
the data of the message. A frame without a subject is for the link itself. Between processes of a host one with data
announces the subjects that its sender takes messages on; between hosts it belongs to the handshake. One without data
announces that its sender ends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

HEADER = struct.Struct("<IB")

MAX_FRAME_BYTES = 128 << 20
"""The largest frame: the data of a batch is smaller, since each of its requests was a message of nats-server."""

MAX_SUBJECT_BYTES = 255

_LENGTH_BYTES = 4

Outgoing = tuple[str, bytes]
"""A message to send: (subject, data)."""

Place = Callable[[bytes, int], memoryview | None]
"""Returns the buffer for the data of a frame with this subject and size; None has the data returned as bytes."""


class MalformedFrame(ValueError):
    """Bytes on a link that are not a frame. What follows them can't be read."""


def pack_frames(messages: Iterable[Outgoing]) -> bytes:
    """Returns the frames of these messages. Their data is copied once.

    Raises ValueError for a subject that is too long or data that is too large.
    """
    pieces: list[bytes] = []
    for subject, data in messages:
        name = subject.encode()
        size = 1 + len(name) + len(data)
        if len(name) > MAX_SUBJECT_BYTES or size > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(data)} bytes on a subject of {len(name)} bytes does not fit a frame")
        pieces += (HEADER.pack(size, len(name)), name, data)
    return b"".join(pieces)


def frame_bytes(message: Outgoing) -> int:
    """The size of the frame of a message."""
    subject, data = message
    return HEADER.size + len(subject.encode()) + len(data)


def pack_header(subject: bytes, size_bytes: int) -> bytes:
    """Returns the beginning of a frame that `size_bytes` of data follow."""
    return HEADER.pack(1 + len(subject) + size_bytes, len(subject)) + subject


def pack_subjects(subjects: Iterable[str]) -> bytes:
    """Returns the data of the frame that announces on which subjects its sender takes messages."""
    return "\n".join(subjects).encode()


def unpack_subjects(data: bytes) -> list[str]:
    """Returns the subjects that `pack_subjects` was given. Raises MalformedFrame."""
    try:
        return data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"an announcement of subjects that is not UTF-8: {data[:100]!r}") from error


class FrameReader:
    """Divides a stream of bytes into frames. Frames of more than `max_frame_bytes` are malformed.

    After the frames that `feed` returns, `begin_placing` may provide a buffer for the one that has arrived in part. While
    `target` is set, the next bytes are to be put there, and their number is passed to `fill`. A frame that lies in such a
    buffer is not returned.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.target: memoryview | None = None
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = _LENGTH_BYTES

    @property
    def missing_bytes(self) -> int:
        """How many bytes are missing until a frame is complete, as far as can be seen; at least 1."""
        return max(1, self._need - self._have)

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the subject and the data of each frame that `data` completes. Raises MalformedFrame."""
        if self._chunks:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._chunks)
            self._chunks = []
        frames: list[tuple[bytes, bytes]] = []
        start, end = 0, len(data)
        self._need = _LENGTH_BYTES
        while end - start > _LENGTH_BYTES:
            size, subject_length = HEADER.unpack_from(data, start)
            if not subject_length < size <= self.max_frame_bytes:
                raise MalformedFrame(f"a frame of {size} bytes with a subject of {subject_length}")
            stop = start + _LENGTH_BYTES + size
            if stop > end:
                self._need = stop - start
                break
            begin = start + HEADER.size
            middle = begin + subject_length
            frames.append((data[begin:middle], data[middle:stop]))
            start = stop
        if start < end:
            self._chunks = [data[start:] if start else data]
        self._have = end - start
        return frames

    def fill(self, count: int) -> None:
        """Takes the next `count` bytes, which lie in `target`."""
        if self.target is not None:
            self.target = self.target[count:] if count < len(self.target) else None

    def begin_placing(self, place: Place) -> None:
        """Sets `target` if a frame has arrived in part and `place` returns a buffer for its data."""
        if self._need == _LENGTH_BYTES or not self._chunks:
            return
        data = b"".join(self._chunks)
        self._chunks = [data]
        _, subject_length = HEADER.unpack_from(data)
        middle = HEADER.size + subject_length
        if middle > len(data):
            return
        buffer = place(data[HEADER.size : middle], self._need - middle)
        if buffer is not None:
            arrived = len(data) - middle
            buffer[:arrived] = memoryview(data)[middle:]
            self.target = buffer[arrived:]
            self._chunks, self._have, self._need = [], 0, _LENGTH_BYTES
