"""How a worker and the process of a Python model communicate: msgpack arrays over socket pairs, each preceded by its
length.

Three channels join them. On the first the worker sends commands: to load the model, or to run a batch. On the second the
process sends responses and queries, from any of its threads and however many batches are open. On these two each message is
answered with DONE or FAILED before the next one, so that nothing piles up. On the third the process sends what may take
long: requests to other models, and changes of the repository. Any number of these calls may be open; the process numbers
them.

The requests of a microbatch come in one message and run one after another. `StartTickets` let the worker take back those
that have not started, and see how far the process is, while the process runs the model's code.

Both ends import this file, so that neither can drift from the other.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from enum import IntEnum
from typing import Any

import msgpack

INLINE_LIMIT = 64 * 1024
"""Tensors of more bytes than this are passed in shared memory."""

MAX_MESSAGE_BYTES = 1 << 29
"""The longest message. Text that a model writes into the channel by mistake reads as a greater length."""

_INT = struct.Struct("i")

LENGTH = struct.Struct("<I")
"""Precedes each message: its length in bytes."""


class Kind(IntEnum):
    """The first element of a message. The comment at each kind lists the others, and the value of its DONE."""

    INITIALIZE = 1
    """arguments of the model's `initialize`. DONE: whether it has an `is_ready`."""
    AUTO_COMPLETE = 2
    """model configuration as JSON. DONE: the completed one, as JSON."""
    EXECUTE = 3
    """number of the run, requests. DONE: for each a response, or None for one that is sent on the second channel."""
    EXECUTE_EACH = 4
    """number of the run, requests, each of which runs alone if there is a ticket for it. The memory of outcomes gets for
    each: (start, end, DONE or FAILED, value as for EXECUTE), with times in ns. DONE: where that memory's content ends."""
    FINALIZE = 5
    """DONE: None; the process ends."""
    DONE = 6
    """the value."""
    FAILED = 7
    """the reason, as text for the client."""
    RESPONSE = 8
    """number of the run, position of the request in it, response or None, whether it is final. DONE: None."""
    IS_CANCELLED = 9
    """number of the run, position of the request in it. DONE: whether its client has cancelled it."""
    RUN_FAILED = 10
    """number of the run, reason: its requests without a final response have failed. DONE: None."""
    DROPPED = 11
    """number of the run, position of the request in it: the model has deleted its response sender. DONE: None."""
    LOG = 20
    """log settings by name. DONE: None."""
    CALL = 30
    """number of the call, whether it may have several responses, the request. Responses are CALL_RESPONSE messages."""
    CANCEL_CALL = 31
    """number of the call, whether its further responses are still wanted. No reply."""
    RELEASE = 32
    """tensors of responses that were read, each (segment, slot, generation). No reply."""
    LOAD = 33
    """number of the call, model, its configuration or None, files by path. The number precedes the value in the reply."""
    UNLOAD = 34
    """number of the call, model, whether with its dependents. Reply as for LOAD."""
    IS_MODEL_READY = 35
    """number of the call, model, version. Reply as for LOAD: whether it is ready."""
    TENSORS_COPIED = 36
    """number of the call: the memory of its large tensors may be reused."""
    CALL_RESPONSE = 37
    """number of the call, response, whether it is final."""
    METRIC_FAMILY = 50
    """number of the call, the process's number for the family, name, description, kind. Reply as for LOAD."""
    METRIC = 51
    """number of the call, the family's number, labels, bounds or None. Reply as for LOAD: (index, bounds)."""
    METRIC_FAMILIES_DELETED = 52
    """numbers of families that the model has deleted. No reply."""


class StartTickets:
    """A pipe with a byte for each request of a microbatch that has not started. For any thread.

    The process takes a ticket before it starts a request; the worker, which holds both ends, takes back what is left. The
    kernel gives each ticket to one of them. What the process wrote to shared memory before it took a ticket is visible to
    whoever has seen since that the ticket is gone. `write_fd` is -1 in the process.
    """

    def __init__(self, read_fd: int, write_fd: int = -1) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        os.set_blocking(read_fd, False)

    def put(self, count: int) -> None:
        """Adds tickets; at most a microbatch's, which the pipe always has room for."""
        os.write(self._write_fd, bytes(count))

    def take(self, count: int = 1) -> int:
        """Takes up to `count` tickets; returns how many there were."""
        try:
            return len(os.read(self._read_fd, count))
        except BlockingIOError:
            return 0

    @property
    def left(self) -> int:
        """How many tickets there are."""
        (count,) = _INT.unpack(fcntl.ioctl(self._read_fd, termios.FIONREAD, bytes(_INT.size)))
        return int(count)


class Channel:
    """One end of a channel. For one thread at a time, or one that sends and another that receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        # User text may hold lone surrogates, which must not break the channel.
        self._pack = msgpack.Packer(autoreset=True, unicode_errors="replace").pack
        self._buffer = bytearray(2 * INLINE_LIMIT)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def fileno(self) -> int:
        """The file descriptor of this end."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Limits each wait for the other end; None is no limit."""
        self._socket.settimeout(seconds)

    def send(self, *message: Any) -> None:
        """Sends one message.

        Raises OSError when the other end is closed, TypeError, ValueError or OverflowError for values that can't be packed.
        """
        payload = self._pack(message)
        self._socket.sendall(LENGTH.pack(len(payload)) + payload)

    def receive(self) -> Any:
        """The next message, as a tuple.

        Raises EOFError or OSError when the other end is closed, TimeoutError, and ValueError for a malformed message, after
        which the channel can't be used.
        """
        self._fill(LENGTH.size)
        (length,) = LENGTH.unpack_from(self._buffer, self._start)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        self._fill(LENGTH.size + length)
        body = self._start + LENGTH.size
        self._start = body + length
        return msgpack.unpackb(self._view[body : self._start], use_list=False)

    def shut_down(self) -> None:
        """Ends the connection: a `receive` that waits at either end raises. For any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has already ended

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def _fill(self, wanted: int) -> None:
        while self._end - self._start < wanted:
            if self._start == self._end:
                self._start = self._end = 0
            if self._start + wanted > len(self._buffer):
                self._make_room(wanted)
            received = self._socket.recv_into(self._view[self._end :])
            if received == 0:
                raise EOFError("the other end of the channel is closed")
            self._end += received

    def _make_room(self, wanted: int) -> None:
        kept = self._view[self._start : self._end]
        buffer = bytearray(max(wanted, len(self._buffer)))
        buffer[: len(kept)] = kept
        self._start, self._end = 0, len(kept)
        self._buffer, self._view = buffer, memoryview(buffer)
