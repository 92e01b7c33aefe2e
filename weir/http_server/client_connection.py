"""`ClientConnection`: what a connection is, whatever its client sends: admission, memory, pauses, and when it is closed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from weir.access.gate import CertificateNames, Kept
from weir.http_server.asgi import raw_error_response
from weir.http_server.connection_cap import CappedConnection, ConnectionCap, principal_of
from weir.http_server.connection_memory import ConnectionMemory
from weir.http_server.read_turns import ReadTurns
from weir.http_server.stall_detection import STALL_PERIOD_S, UNREAD_PERIOD_S, StallDetector
from weir.http_server.tls import certificate_of
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.core.errors import WeirError, overloaded

FIRST_REQUEST_S = 20.0
"""How long a new connection may stay open without the beginning of a request."""

KEEP_ALIVE_S = 75.0
"""How long a connection may stay idle between two requests."""

CLOSE_NOTIFY_S = 1.0
"""How long an idle connection with TLS, which is closed, waits for its client to agree to that."""

_UNSENT = "unsent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one kind of connections.

    What clients send, and have not read yet, is charged to `ledger`; payload slots in which bodies arrive to
    `arriving_slots`; the connections themselves count in `cap`. The body of a request has at most `max_body_bytes`. After
    `shutdown` an idle connection stays open for `linger_s`.
    """

    ledger: MemoryLedger
    arriving_slots: MemoryLedger
    cap: ConnectionCap
    max_body_bytes: int
    linger_s: float = 0.0


class ClientConnection(asyncio.Protocol, ABC):
    """One connection, in `connections` while it is open. A subclass reads the requests on it.

    `handshake` counts for it until then, where TLS had to be agreed on.
    """

    handshake: CappedConnection | None = None
    certificate: CertificateNames | None = None
    """The names in the certificate that the client has shown, None without one."""
    kept: Kept | None = None
    """What its latest request for inference was admitted by."""
    is_encrypted = False
    transport: Any
    memory: ConnectionMemory
    turns: ReadTurns
    has_served = False

    def __init__(self, limits: ConnectionLimits, connections: set[Any]) -> None:
        self.loop = asyncio.get_running_loop()
        self._limits = limits
        self._connections = connections
        self._is_rejecting = False  # the connection is closing, and what follows is dropped
        self._is_read_paused = False
        self.is_write_paused = False
        self.writable = asyncio.Event()
        """Set while the client reads what it is sent, and when it has disconnected."""
        self.writable.set()
        self._unsent_bytes = 0
        self._reading = StallDetector()
        self._idle_since_s = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def idle_s(self) -> float:
        """Implements `CappedConnection.idle_s`."""

    @abstractmethod
    def is_within_request(self) -> bool:
        """Whether a request is arriving or not answered yet."""

    @abstractmethod
    def check_arrival(self, now_s: float) -> None:
        """Ends the connection if its client has stopped sending a request; `now_s` is monotonic."""

    @abstractmethod
    def end_requests(self) -> None:
        """The connection is lost, and with it its requests."""

    def connection_made(self, transport: Any) -> None:
        """Opens the accounts of the connection in the memory ledgers. Rejects it where there is no room for it."""
        self.transport = transport
        self.turns = ReadTurns(transport, lambda: self._is_read_paused)
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        principal = principal_of(peer[0] if peer else None)
        self.memory = ConnectionMemory(self._limits.ledger, self._limits.arriving_slots, principal)
        self._idle_since_s = self.loop.time()
        self._idle_timer = self.loop.call_later(FIRST_REQUEST_S, self._check_idle)
        if self.handshake is not None:
            self.is_encrypted = True
            self.certificate = certificate_of(transport)
            self._limits.cap.remove(self.handshake)
        if not self._limits.cap.admit(self, principal):
            self._is_rejecting = True
            self.write_and_close(overloaded("the server has too many connections; try again later"))

    def make_room(self) -> None:
        """Implements `CappedConnection.make_room`."""
        self._is_rejecting = True
        if self.is_encrypted:  # it must be gone now, whether or not its client agrees
            self.transport.abort()
        else:
            self.transport.close()

    def close_idle(self) -> None:
        """Closes the connection, on which no response is due."""
        self.transport.close()
        if self.is_encrypted and not self.transport.get_write_buffer_size():
            self.loop.call_later(CLOSE_NOTIFY_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the requests of the connection, and releases what it holds."""
        self._connections.discard(self)
        self._limits.cap.remove(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.end_requests()
        self.writable.set()
        self.memory.close()
        self.turns.close()

    def abort(self) -> None:
        """Ends the connection at once, because its client does not read what it is sent."""
        self.transport.abort()

    def write_and_close(self, error: WeirError) -> None:
        """Writes the response to a request that could not be read, and closes the connection."""
        if self.transport.is_closing():
            return
        self.write_error(error)
        self.transport.close()

    def write_error(self, error: WeirError) -> None:
        """Writes an error response that announces the end of the connection."""
        head, body = raw_error_response(error)
        self.transport.write(b"%bContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (head, len(body), body))

    def pause_reading(self) -> None:
        """Reads nothing more from the client until `resume_reading`."""
        if not self._is_read_paused:
            self._is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads from the client again."""
        if self._is_read_paused:
            self._is_read_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent responses: charges what waits for it."""
        self.is_write_paused = True
        self.writable.clear()
        unsent_bytes = self.transport.get_write_buffer_size()
        if self.memory.account.charge(_UNSENT, unsent_bytes):
            self._unsent_bytes += unsent_bytes
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """The client has read enough of what it was sent."""
        self.is_write_paused = False
        self.writable.set()
        self.memory.account.release(_UNSENT, self._unsent_bytes)
        self._unsent_bytes = 0

    def _check_idle(self) -> None:
        """Closes the connection if it has been idle for too long, or checks again when it may have been.

        The head of a request has its own time to arrive (`check_arrival`).
        """
        if self.transport.is_closing():
            return
        limit_s = KEEP_ALIVE_S if self.has_served else FIRST_REQUEST_S
        idle_s = 0.0 if self.is_within_request() else self.loop.time() - self._idle_since_s
        if idle_s < limit_s:
            self._idle_timer = self.loop.call_later(limit_s - idle_s, self._check_idle)
            return
        if not self.has_served:
            self._limits.cap.count_silent()
        self.close_idle()

    def check_progress(self, now_s: float) -> None:
        """Ends the connection if its client has stopped sending a request, or reading a response."""
        if self.transport.is_closing() or self.is_write_paused:
            unsent_bytes = self.transport.get_write_buffer_size()
            is_over = self.transport.is_closing() and not unsent_bytes  # with TLS, until the client agrees
            period_s = STALL_PERIOD_S if is_over or self._limits.ledger.is_short else UNREAD_PERIOD_S
            if (unsent_bytes or is_over) and self._reading.is_stalled(now_s, -unsent_bytes, period_s):
                self.transport.abort()
            return
        self._reading.reset()
        self.check_arrival(now_s)
