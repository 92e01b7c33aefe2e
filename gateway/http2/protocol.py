"""`Http2Protocol`: a connection on a transport.

What is written in one turn of the event loop is sent together. While the transport is full, nothing is read: a peer that
does not read its responses makes no progress.
"""

from __future__ import annotations

import asyncio
from typing import Any

from weir.access.gate import CertificateNames
from weir.gateway.http2.connection import Connection
from weir.gateway.http2.frames import Http2ErrorCode
from weir.gateway.http2.keepalive import KeepaliveManager
from weir.gateway.http2.options import Http2Options
from weir.gateway.http2.send_buffer import SendBuffer
from weir.gateway.http2.stream import Application
from weir.http_server.connection_cap import MAX_CONNECTIONS, CappedConnection, ConnectionCap, principal_of
from weir.http_server.read_turns import ReadTurns
from weir.http_server.stall_detection import STALL_PERIOD_S, UNREAD_PERIOD_S, StallDetector
from weir.http_server.tls import certificate_of
from weir.runtime.memory_ledger import MemoryLedger

_HIGH_WATER_BYTES = 512 * 1024
_CLOSE_TIMEOUT_S = 5.0
_ROOM_TIMEOUT_S = 0.1
"""How long a connection with TLS that gives room to another one has to send its last frame."""


class Http2Protocol(asyncio.Protocol):
    """One connection; it is in `connections` for as long as its transport is.

    `handshake` counts for it until then, where TLS had to be agreed on.
    """

    handshake: CappedConnection | None = None
    certificate: CertificateNames | None = None
    """The names in the certificate that the client has shown, None without one."""
    connection: Connection
    _turns: ReadTurns
    _keepalive: KeepaliveManager
    _transport: Any

    def __init__(
        self,
        application: Application,
        options: Http2Options,
        connections: set[Http2Protocol],
        ledger: MemoryLedger | None = None,
        cap: ConnectionCap | None = None,
    ) -> None:
        self._application = application
        self._loop = asyncio.get_running_loop()
        self._connections = connections
        self._options = options
        self._is_listening = True
        self._ledger = ledger or MemoryLedger()
        self._cap = cap or ConnectionCap(MAX_CONNECTIONS)
        self._paused_bytes = 0  # charged for what waits in the transport
        self._reading = StallDetector()  # watches how the peer reads what the transport holds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements `asyncio.Protocol.connection_made`."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._connections.add(self)
        address = transport.get_extra_info("peername")
        principal = principal_of(address[0] if address else None)
        self._turns = ReadTurns(self._transport, lambda: not self._is_listening)
        self._account = self._ledger.account(principal, has_many=True)
        self._send_buffer = SendBuffer(self._schedule_flush, self._account)
        self.connection = Connection(self._application, self._options, self._loop.time, self._send_buffer)
        self._keepalive = KeepaliveManager(self.connection, self._options, self.abort, self._cap.count_silent)
        if self.handshake is not None:
            self.certificate = self.connection.certificate = certificate_of(transport)
            self._cap.remove(self.handshake)
        if not self._cap.admit(self, principal):
            self.connection.close(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many connections")

    @property
    def has_served(self) -> bool:
        """Implements `CappedConnection.has_served`."""
        return self.connection.has_had_streams

    def idle_s(self) -> float:
        """Implements `CappedConnection.idle_s`."""
        if self.connection.streams or self.connection.is_closed:
            return 0.0
        return self._keepalive.idle_s()

    def make_room(self) -> None:
        """Implements `CappedConnection.make_room`: the client may send its next call on another connection."""
        self.connection.close()
        if self.handshake is not None:  # with TLS the client would have to agree to the end
            self._loop.call_later(_ROOM_TIMEOUT_S, self.abort)

    def data_received(self, data: bytes) -> None:
        """Implements `asyncio.Protocol.data_received`."""
        self._keepalive.last_received_s = self._loop.time()
        self._turns.count(len(data))
        was_behind = self.connection.is_behind
        self.connection.receive(data)
        self._govern_reading()
        if self.connection.is_behind and not was_behind:
            self._loop.call_soon(self._proceed)

    def _proceed(self) -> None:
        """Goes on with what was read, in a turn of the event loop that others had a part of."""
        self.connection.proceed()
        self._govern_reading()
        if self.connection.is_behind and not self.connection.is_closed:
            self._loop.call_soon(self._proceed)

    def pause_writing(self) -> None:
        """Implements `asyncio.Protocol.pause_writing`."""
        self._send_buffer.pause()
        self._govern_reading()
        unsent_bytes = self._transport.get_write_buffer_size()
        if self._account.charge("unsent", unsent_bytes):
            self._paused_bytes += unsent_bytes
        else:
            self.abort()

    def resume_writing(self) -> None:
        """Implements `asyncio.Protocol.resume_writing`."""
        self._account.release("unsent", self._paused_bytes)
        self._paused_bytes = 0
        self._send_buffer.resume()
        self._govern_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implements `asyncio.Protocol.connection_lost`."""
        self._connections.discard(self)
        self._cap.remove(self)
        self._keepalive.end()
        self._turns.close()
        self.connection.lose()
        self._account.close()

    def check_progress(self, now_s: float) -> None:
        """Ends streams, or the connection, whose client has stopped sending or reading."""
        period_s = STALL_PERIOD_S if self._ledger.is_short else UNREAD_PERIOD_S
        unsent_bytes = self._transport.get_write_buffer_size()
        if not unsent_bytes:
            self._reading.reset()
        elif self._reading.is_stalled(now_s, -unsent_bytes, period_s):
            self.abort()
            return
        self.connection.check_progress(now_s, period_s)

    def abort(self) -> None:
        """Closes the connection at once, without GOAWAY."""
        self._transport.abort()

    def _schedule_flush(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        pieces = self._send_buffer.take()
        if self._transport.is_closing():
            return
        self._transport.writelines(pieces)
        self._govern_reading()
        if self.connection.is_closed:
            self._transport.close()
            self._loop.call_later(_CLOSE_TIMEOUT_S, self.abort)

    def _govern_reading(self) -> None:
        listens = not (self._send_buffer.is_behind or self.connection.is_behind)
        if listens == self._is_listening or self._transport.is_closing():
            return
        self._is_listening = listens
        if listens:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
