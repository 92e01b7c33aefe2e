"""`Link`: one connection between two processes of a host.

Any thread may send, and none ever waits: what the socket does not accept at once is buffered, and the event loop writes
it later. A peer that does not read is disconnected, after a time or once the buffer exceeds its limit.

Sending in a thread does not wake the event loop: a thread of an instance writes its responses itself. What was written
reaches the peer even if this process is killed, because the kernel keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from enum import Enum

from weir.bus.links.framing import FrameReader, MalformedFrame, Outgoing, frame_bytes, pack_frames
from weir.runtime.containment import call_each

logger = logging.getLogger("weir.bus")

_AFTER_WRITE = "weir.bus.links.link: what waits for a write"

MAX_BUFFERED_BYTES = 64 << 20
"""Bytes that a peer has not read; a peer that exceeds it is disconnected."""

ENDING: Outgoing = "", b""
"""The last message of a process that ends in good order."""

ERROR_CHECK_DELAY_S = 0.05
"""How long after a read the socket is checked for an error: see `Link._check_error`."""

_SOCKET_BUFFER_BYTES = 1 << 20
_READ_BYTES = 65536

Frames = list[tuple[bytes, bytes]]

WhenWritten = Callable[[bool], None]
"""Called with whether the kernel has everything that was buffered; if not, the connection has ended."""


class Sent(Enum):
    """What became of messages that were sent."""

    WRITTEN = "written"
    """The kernel has them."""

    BUFFERED = "buffered"
    """They are written once the peer reads; `Link.take_unsent` returns them if the connection ends before."""

    REJECTED = "rejected"
    """The connection had ended."""


class LinkEnd(Enum):
    """How a connection has ended."""

    ORDERLY = "orderly"
    """The peer had announced its end."""

    LOST = "lost"
    """The peer has died: it does not listen any more."""

    CUT = "cut"
    """The peer still listens. What was not written completely is sent again."""

    BROKEN_OFF = "broken off"
    """This process has disconnected the peer, some of whose messages it may not have read."""


class _Phase(Enum):
    """What happens to queued messages. Only the thread that has begun `WRITING` uses the socket for it."""

    IDLE = "idle"
    WRITING = "writing"
    BLOCKED = "blocked"  # until the socket accepts more, which the event loop watches
    ENDED = "ended"


class Link:
    """One connection. The owner's callbacks run in the event loop.

    `on_frames` is called with the frames that have arrived, `on_end` once when the connection has ended: it sends the
    messages of `take_unsent` another way, until there are none. A peer that reads nothing for `stall_limit_s` is
    disconnected.
    """

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        on_frames: Callable[[Link, Frames], None],
        on_end: Callable[[Link, LinkEnd], None],
        stall_limit_s: float,
    ) -> None:
        self.name = name
        self._socket = connection
        self._on_frames = on_frames
        self._on_end = on_end
        self._stall_limit_s = stall_limit_s
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._state = threading.Lock()  # held for a few instructions, never during a system call
        self._phase = _Phase.IDLE
        self._queued: list[Outgoing] = []
        self._buffered_bytes = 0  # of messages that are queued or not written completely
        self._when_written: list[WhenWritten] = []
        self._end_due: LinkEnd | None = (
            None  # a thread writes, and must not find another file in the place of its socket
        )
        self._writing: list[Outgoing] = []  # the messages of `_rest`
        self._rest = memoryview(b"")
        self._stall: asyncio.TimerHandle | None = None
        self._error_check: asyncio.TimerHandle | None = None
        self._peer_ends = False
        self._has_ended = False  # in the event loop
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._loop.add_reader(connection.fileno(), self._read)

    # Sending, in any thread

    def send(self, messages: Sequence[Outgoing]) -> Sent:
        """Sends the messages in order, behind those sent before."""
        size_bytes = 0
        for _, data in messages:
            size_bytes += len(data)
        with self._state:
            if self._phase is _Phase.ENDED:
                return Sent.REJECTED
            self._queued += messages
            self._buffered_bytes += size_bytes
            if self._phase is not _Phase.IDLE:
                if self._buffered_bytes > MAX_BUFFERED_BYTES:
                    self._loop.call_soon_threadsafe(self._disconnect_slow_peer)
                return Sent.BUFFERED
            self._phase = _Phase.WRITING
        return self._write()

    def when_written(self, callback: WhenWritten) -> None:
        """Calls `callback`, in any thread, once nothing is buffered, or the connection has ended and `on_end` has run."""
        with self._state:
            if self._phase is _Phase.WRITING or self._phase is _Phase.BLOCKED:
                self._when_written.append(callback)
                return
            is_written = self._phase is _Phase.IDLE
        callback(is_written)

    def _write(self) -> Sent:
        """Writes what is queued, in the thread that has set the phase."""
        while True:
            if not self._rest:
                with self._state:
                    if self._end_due is None and not self._queued:
                        self._phase = _Phase.IDLE
                        waiting, self._when_written = self._when_written, []
                        break
                    self._writing, self._queued = self._queued, []
                self._rest = memoryview(self._packed(self._writing))
            try:
                sent = self._socket.send(self._rest)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                logger.debug("link to %s: %s", self.name, error)
                # What the peer has sent is still to be read: `_read_to_end` does that, and ends the connection.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._stop_writing(has_failed=True)
                return Sent.BUFFERED
            self._rest = self._rest[sent:]
            if self._rest or self._end_due is not None:
                self._stop_writing()
                return Sent.BUFFERED
            with self._state:
                for _, data in self._writing:
                    self._buffered_bytes -= len(data)
        call_each(_AFTER_WRITE, waiting, True)
        return Sent.WRITTEN

    def _packed(self, messages: Sequence[Outgoing]) -> bytes:
        try:
            return pack_frames(messages)
        except ValueError as error:
            logger.error("link to %s: dropped %d messages: %s", self.name, len(messages), error)
            return b""

    def _stop_writing(self, has_failed: bool = False) -> None:
        """Leaves the rest to the event loop, which ends the connection after a failure or if `_end_due` is set."""
        with self._state:
            self._phase = _Phase.BLOCKED
            end = self._end_due
        if end is not None:
            self._loop.call_soon_threadsafe(self._end, end)
        elif has_failed:
            self._loop.call_soon_threadsafe(self._read_to_end)
        else:
            self._loop.call_soon_threadsafe(self._watch_writable)

    # In the event loop

    def _watch_writable(self) -> None:
        if self._phase is _Phase.BLOCKED and not self._has_ended:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
            self._stall = self._loop.call_later(self._stall_limit_s, self._disconnect_stalled_peer)

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        if self._stall is not None:
            self._stall.cancel()
        with self._state:
            self._phase = _Phase.WRITING
        self._write()

    def _disconnect_stalled_peer(self) -> None:
        logger.warning(
            "link to %s: the process has read nothing for %.1f s; closing the link, messages go through nats-server",
            self.name,
            self._stall_limit_s,
        )
        self._end(LinkEnd.BROKEN_OFF)

    def _disconnect_slow_peer(self) -> None:
        if not self._has_ended and self._buffered_bytes > MAX_BUFFERED_BYTES:
            logger.warning(
                "link to %s: the process has not read %d bytes; closing the link, messages go through nats-server",
                self.name,
                self._buffered_bytes,
            )
            self._end(LinkEnd.BROKEN_OFF)

    def _read(self) -> bool:
        """Reads once; returns whether there was something to read."""
        try:
            data = self._socket.recv(max(_READ_BYTES, self._reader.missing_bytes))
        except BlockingIOError:
            return False
        except OSError as error:
            logger.debug("link to %s: %s", self.name, error)
            data = b""
        if not data:
            self._end(LinkEnd.ORDERLY if self._peer_ends else LinkEnd.LOST)
            return False
        if self._error_check is None:
            self._error_check = self._loop.call_later(ERROR_CHECK_DELAY_S, self._check_error)
        try:
            frames = self._reader.feed(data)
        except MalformedFrame as error:
            logger.error("link to %s: closing it, because the process does not send frames: %s", self.name, error)
            self._end(LinkEnd.BROKEN_OFF)
            return False
        if frames:
            self._peer_ends = self._peer_ends or frames[-1] == (b"", b"")
            self._on_frames(self, frames)
        return True

    def _check_error(self) -> None:
        """Reads the rest if the peer has ended before it has read everything.

        The kernel then sets an error on the socket. libuv reports a socket with an error once and stops watching it
        (`uv__poll_io`), so `_read` is not called for what is behind the first read, or for the end.
        """
        self._error_check = None
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._read_to_end()

    def _read_to_end(self) -> None:
        while not self._has_ended and self._read():
            pass

    def read_waiting(self) -> None:
        """Reads what has arrived, without waiting for the event loop to report it."""
        self._read_to_end()

    def close(self) -> None:
        """Announces the end of this process and ends the connection."""
        self.send([ENDING])
        self._end(LinkEnd.ORDERLY)

    def _end(self, end: LinkEnd) -> None:
        with self._state:
            if self._has_ended:
                return
            end = self._end_due or end  # the first reason counts: after it the socket is read to its end
            if self._phase is _Phase.WRITING:
                # The thread calls this again when it has noticed.
                self._end_due = end
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return
            self._has_ended = True
            self._phase = _Phase.BLOCKED  # what threads send goes behind what is unsent
        for timer in (self._stall, self._error_check):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        try:
            self._on_end(self, end)
        finally:
            while self.take_unsent():
                pass  # `on_end` has raised an exception
            waiting, self._when_written = self._when_written, []
            call_each(_AFTER_WRITE, waiting, False)

    def take_unsent(self) -> list[Outgoing]:
        """Returns the messages that were not written completely, after the end; called again until there is nothing more.

        From then on the link rejects messages: what threads have sent meanwhile goes the same way, and in order.
        """
        while True:
            with self._state:
                unsent = [*_unwritten(self._writing, len(self._rest)), *self._queued]
                self._writing, self._rest, self._queued = [], memoryview(b""), []
                if not unsent:
                    self._phase = _Phase.ENDED
                    return []
            # Those of the link itself have no subject.
            if messages := [message for message in unsent if message[0]]:
                return messages


def _unwritten(messages: Sequence[Outgoing], rest_bytes: int) -> Sequence[Outgoing]:
    """The last ones of these messages, of whose frames `rest_bytes` are left to write."""
    count = 0
    while rest_bytes > 0 and count < len(messages):
        count += 1
        rest_bytes -= frame_bytes(messages[-count])
    return messages[len(messages) - count :]
