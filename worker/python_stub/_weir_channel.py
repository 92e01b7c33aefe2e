"""How a worker and the process of a Python model talk: msgpack arrays over a socket pair, each after its length.

Three channels join them. On the first the worker asks, to load the model or to run a batch, and on the second the
process does, whenever the model has a response to send or wants to know something, from whichever thread and however
many batches are open: every question is answered with DONE or FAILED before the next one, so nothing piles up. On the
third the model asks for what takes its time, other models' answers and changes of the repository: any number of calls
are under way there at once, each under a number that the process gives it.
Both ends import this file, so that neither can drift from the other.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Any

import msgpack

INLINE_LIMIT = 64 * 1024
"""Tensors of more bytes than this travel in shared memory."""

MAX_MESSAGE_BYTES = 1 << 29
"""No message is longer. What a model has written into the channel by mistake begins with more, if it is text."""

LENGTH = struct.Struct("<I")
"""What stands before each message: its bytes."""


class Kind(IntEnum):
    """What a message is: its first element. The others are named beside it."""

    INITIALIZE = 1
    """arguments for the model's `initialize`. Done: whether it has an `is_ready`."""
    AUTO_COMPLETE = 2
    """model configuration as JSON. Done: the completed one, as JSON."""
    EXECUTE = 3
    """number of the run, requests. Done: for each a response, or None for one that is answered on the other channel."""
    FINALIZE = 5
    """Done: None; the process ends."""
    DONE = 6
    """the answer's value."""
    FAILED = 7
    """why, as text for the client."""
    RESPONSE = 8
    """number of the run, place of the request in it, response or None, whether it is the last. Done: None."""
    IS_CANCELLED = 9
    """number of the run, place of the request in it. Done: whether its caller has given up."""
    RUN_FAILED = 10
    """number of the run, why: what it has not answered yet has failed. Done: None."""
    DROPPED = 11
    """number of the run, place of the request in it: the model holds nothing any more that could answer it. Done: None."""
    LOG = 20
    """log settings, by their names. Done: None."""
    CALL = 30
    """number of the call, whether it may have several responses, the request. Answered with ANSWER."""
    GIVE_UP = 31
    """number of the call: its responses are wanted no more. No answer."""
    RELEASE = 32
    """tensors of answers that have been read, each (segment, slot, generation). No answer."""
    LOAD = 33
    """number of the call, model, its configuration or None, files by path. DONE with the number, FAILED with it."""
    UNLOAD = 34
    """number of the call, model, whether with its dependents. As LOAD."""
    IS_MODEL_READY = 35
    """number of the call, model, version. DONE with the number and whether it is."""
    TAKEN = 36
    """number of the call: the memory in which its large tensors lay may be used again."""
    ANSWER = 37
    """number of the call, response, whether it is the last."""
    METRIC_FAMILY = 50
    """number of the call, the process's number for the family, name, description, kind. As LOAD."""
    METRIC = 51
    """number of the call, the family's number, labels, bounds or None. DONE with the number, place and bounds."""
    METRIC_FAMILIES_GONE = 52
    """numbers of families that the model has given up. No answer."""


class Channel:
    """One end of the socket pair. Used by one thread at a time, or by one that sends and another that receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        # User text may hold lone surrogates, which must not break the channel.
        self._pack = msgpack.Packer(autoreset=True, unicode_errors="replace").pack
        self._buffer = bytearray(2 * INLINE_LIMIT)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def set_timeout(self, seconds: float | None) -> None:
        """Bounds each wait for the other end; None waits for ever."""
        self._socket.settimeout(seconds)

    def send(self, *message: Any) -> None:
        """Sends one message.

        Raises OSError when the other end is gone, TypeError, ValueError or OverflowError for what can't be packed.
        """
        payload = self._pack(message)
        self._socket.sendall(LENGTH.pack(len(payload)) + payload)

    def receive(self) -> Any:
        """The next message, as a tuple.

        Raises EOFError or OSError when the other end is gone, TimeoutError, and ValueError for what is no message: after
        that the channel is of no use.
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
        """Ends the connection: whoever waits in `receive`, at either end, learns so. For any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended before

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
