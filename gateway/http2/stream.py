"""`Stream`: one request and its response on a connection (RFC 9113, sections 5.1 and 6.9), and its interfaces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from weir.access.gate import CertificateNames, Kept
from weir.gateway.http2.frames import (
    MAX_WINDOW,
    Flag,
    FrameType,
    Http2ErrorCode,
    Http2StreamError,
    frame_head,
    rst_stream,
    window_update,
)
from weir.gateway.http2.headers import RequestHead
from weir.gateway.http2.send_buffer import SendBuffer
from weir.http_server.stall_detection import StallDetector
from weir.runtime.containment import contained

STREAM_WINDOW_BYTES = 4 * 1024 * 1024
"""The flow-control window of one request; granted again when half of it is used."""

_NO_DATA: deque[bytes | memoryview] = deque()
_HEADERS = int(FrameType.HEADERS)
_DATA = int(FrameType.DATA)
_NOT_LAST = int(Flag.END_HEADERS)
_LAST = int(Flag.END_HEADERS | Flag.END_STREAM)


class Exchange(Protocol):
    """The application's handler of one stream; it may send from within any of these calls. An exception ends the stream."""

    def begin(self) -> None:
        """The stream is open."""

    def receive(self, data: bytes | memoryview) -> None:
        """The next bytes of the request; a view keeps all that was read with it."""

    def end(self) -> None:
        """The request is complete."""

    def drained(self) -> None:
        """All waiting data has been sent, and the response is not complete."""

    def check_progress(self, now_s: float) -> None:
        """Called every few seconds while no data waits: ends the stream if a message of the request has stalled."""

    def closed(self) -> None:
        """Called once, at the end: the response is being sent, or the request was cancelled. Nothing more can be sent."""


class Application(Protocol):
    """Handles the requests of connections."""

    def interpret(self, head: RequestHead) -> Any:
        """The meaning of a request's head; shared by requests with the same head."""

    def open(self, stream: Stream, meaning: Any) -> Exchange:
        """The exchange for a request whose head has this meaning; nothing can be sent yet."""


class StreamConnection(Protocol):
    """What a stream needs of its `Connection`."""

    buffered_bytes: int
    certificate: CertificateNames | None
    kept: Kept | None
    send_buffer: SendBuffer

    def respond(self, *pieces: bytes | memoryview) -> None:
        """Writes a part of a response."""

    def grant(self) -> None:
        """Widens the peer's window once half of it is used."""

    def forget(self, stream: Stream) -> None:
        """Removes `stream`, which is closed."""


class Stream:
    """One stream. It passes what the peer sends on to its `exchange`; `window` is the peer's window for responses.

    `unsent_bytes` of data wait for the peer; `is_queued` belongs to `SendBuffer`. While the stream is on hold, the peer
    may use the window that it has, and gets no more.
    """

    __slots__ = (
        "_grant_left",
        "_is_on_hold",
        "_progress",
        "_request_complete",
        "_send_buffer",
        "_sent_waiting_bytes",
        "_trailers",
        "_waiting",
        "connection",
        "exchange",
        "id",
        "is_closed",
        "is_queued",
        "unsent_bytes",
        "window",
    )

    exchange: Exchange

    def __init__(self, connection: StreamConnection, stream_id: int, window: int) -> None:
        self._grant_left = STREAM_WINDOW_BYTES
        self._is_on_hold = False
        self._waiting: deque[bytes | memoryview] = _NO_DATA
        self._send_buffer = connection.send_buffer
        self._progress: StallDetector | None = None
        self._request_complete = False
        self._sent_waiting_bytes = 0
        self._trailers = b""
        self.connection = connection
        self.id = stream_id
        self.is_closed = False
        self.is_queued = False
        self.unsent_bytes = 0
        self.window = window

    # Frames of the peer

    @contained(on_error="_reset_after", passes=(Http2StreamError,))
    def receive(self, data: bytes | memoryview, flow_bytes: int, is_last: bool) -> None:
        """Takes DATA, of `flow_bytes` with its padding. Raises Http2StreamError if it violates the protocol."""
        if self._request_complete:
            raise Http2StreamError(Http2ErrorCode.STREAM_CLOSED)
        self._grant_left -= flow_bytes
        if self._grant_left < 0:
            raise Http2StreamError(Http2ErrorCode.FLOW_CONTROL_ERROR)
        if data:
            self.exchange.receive(data)
        if is_last:
            self.end()
        elif self._grant_left < STREAM_WINDOW_BYTES // 2 and not self._is_on_hold:
            self._grant()

    @contained(on_error="_reset_after", passes=(Http2StreamError,))
    def end(self) -> None:
        """The request is complete. Raises Http2StreamError if it was complete before."""
        if self._request_complete:
            raise Http2StreamError(Http2ErrorCode.STREAM_CLOSED)
        self._request_complete = True
        if not self.is_closed:
            self.exchange.end()

    @contained(on_error="_reset_after", passes=(Http2StreamError,))
    def begin(self, application: Application, meaning: Any) -> None:
        """Opens the exchange of this stream, whose request begins with `meaning`. Raises Http2StreamError."""
        self.exchange = application.open(self, meaning)
        self.exchange.begin()

    def _reset_after(self, _error: Exception, *_arguments: object) -> None:
        """Ends the stream after an unexpected exception of its exchange; the others of the connection go on."""
        self.reset(Http2ErrorCode.INTERNAL_ERROR)

    def widen(self, increment: int) -> None:
        """Adds `increment` bytes to the peer's window. Raises Http2StreamError beyond the maximum (section 6.9.1)."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise Http2StreamError(Http2ErrorCode.FLOW_CONTROL_ERROR)
        if self.unsent_bytes and self.window > 0:
            self._send_buffer.enqueue(self)

    # Called by the application

    def hold(self) -> None:
        """Stops widening the peer's window, until `resume`."""
        self._is_on_hold = True

    def resume(self) -> None:
        """Widens the peer's window again."""
        self._is_on_hold = False
        if self._grant_left < STREAM_WINDOW_BYTES // 2 and not self._request_complete:
            self._grant()

    @property
    def held_bytes(self) -> int:
        """Implements `QueuedStream.held_bytes`."""
        return self.unsent_bytes

    def send(self, headers: bytes = b"", data: Sequence[bytes] = (), trailers: bytes = b"") -> bool:
        """Sends the parts of a response that are given, in this order; `headers` and `trailers` are header blocks.

        Trailers end the stream; trailers alone are a complete response. Data beyond the peer's window waits. Sending on a
        closed stream, or after trailers, does nothing. Returns False, and sends nothing, if the connection may hold no more
        waiting data.
        """
        if self.is_closed or self._trailers:
            return True
        size = sum(map(len, data))
        parts: list[bytes | memoryview] = []
        if headers:
            parts += (frame_head(len(headers), _HEADERS, _NOT_LAST, self.id), headers)
        holds_back = self.unsent_bytes > 0 or (
            size > 0 and (size > self.window or not self._send_buffer.can_write(size))
        )
        if holds_back:
            if not self._send_buffer.hold_back(self, size):
                return False
        else:
            if size:
                self.window -= size
                self._send_buffer.window -= size
                self._send_buffer.turn_bytes += size
                parts += self._frames(data, size)
            if trailers:
                parts += (frame_head(len(trailers), _HEADERS, _LAST, self.id), trailers)
        if parts:
            self.connection.respond(*parts)
        if holds_back:
            self._hold_back(data, size, trailers)
        elif trailers:
            self._finish()
        return True

    @contained(on_error="_reset_after")
    def check_progress(self, now_s: float, unread_period_s: float) -> None:
        """Ends the stream if its client reads too little in `unread_period_s`, or its request has stalled."""
        if not self.unsent_bytes:
            self._progress = None
            self.exchange.check_progress(now_s)
            return
        if self._progress is None:
            self._progress = StallDetector()
        if self._progress.is_stalled(now_s, self._sent_waiting_bytes, unread_period_s):
            self.reset(Http2ErrorCode.ENHANCE_YOUR_CALM)

    def reset(self, code: Http2ErrorCode) -> None:
        """Ends the stream at once with RST_STREAM."""
        if not self.is_closed:
            self._send_buffer.write(rst_stream(self.id, code))
            self.abort()

    def abort(self) -> None:
        """Ends the stream without its complete response."""
        if not self.is_closed:
            self._send_buffer.release(self.unsent_bytes)
            self.unsent_bytes = 0
            self._waiting = _NO_DATA
            self._close()

    def send_waiting(self, limit: int) -> int:
        """Sends a frame of at most `limit` bytes of waiting data, and trailers after the last. Returns the bytes sent."""
        size = min(limit, self.window, self.unsent_bytes)
        if size <= 0:
            return 0
        self.window -= size
        self.unsent_bytes -= size
        self._send_buffer.window -= size
        self._sent_waiting_bytes += size
        self._send_buffer.release(size)
        self.connection.respond(frame_head(size, _DATA, 0, self.id), *_take(self._waiting, size))
        if not self.unsent_bytes:
            self._waiting = _NO_DATA
            if self._trailers:
                self.connection.respond(frame_head(len(self._trailers), _HEADERS, _LAST, self.id), self._trailers)
                self._finish()
            else:
                self._drained()
        self.connection.grant()
        return size

    @contained(on_error="_reset_after")
    def _drained(self) -> None:
        self.exchange.drained()

    def _grant(self) -> None:
        if not self.is_closed:
            self._send_buffer.write(window_update(self.id, STREAM_WINDOW_BYTES - self._grant_left))
            self._grant_left = STREAM_WINDOW_BYTES

    def _hold_back(self, data: Sequence[bytes], size: int, trailers: bytes) -> None:
        if not self.unsent_bytes:
            self._waiting = deque()
        self._waiting += data
        self._trailers = trailers
        self.unsent_bytes += size
        if self.window > 0:
            self._send_buffer.enqueue(self)

    def _frames(self, data: Sequence[bytes], size: int) -> list[bytes | memoryview]:
        """`data`, of `size` bytes, as frames of at most the size that the peer accepts."""
        if size <= self._send_buffer.frame_bytes:
            return [frame_head(size, _DATA, 0, self.id), *data]
        waiting: deque[bytes | memoryview] = deque(data)
        parts: list[bytes | memoryview] = []
        while size:
            length = min(size, self._send_buffer.frame_bytes)
            parts += (frame_head(length, _DATA, 0, self.id), *_take(waiting, length))
            size -= length
        return parts

    def _finish(self) -> None:
        if not self._request_complete:
            # Tells the peer to stop sending the request (RFC 9113, section 8.1).
            self._send_buffer.write(rst_stream(self.id, Http2ErrorCode.NO_ERROR))
        self._close()

    def _close(self) -> None:
        self.is_closed = True
        self.connection.forget(self)
        self._exchange_closed()

    @contained(on_error="_close_exchange_again")
    def _exchange_closed(self) -> None:
        if hasattr(self, "exchange"):  # else the application failed to open one
            self.exchange.closed()

    def _close_exchange_again(self, _error: Exception) -> None:
        """Tries once more: an exchange that is not closed holds memory, and delays the stop of the server."""
        self.exchange.closed()


def _take(waiting: deque[bytes | memoryview], size: int) -> list[bytes | memoryview]:
    """Removes the first `size` bytes of `waiting`, and returns them."""
    pieces: list[bytes | memoryview] = []
    while size:
        piece = waiting.popleft()
        if len(piece) > size:
            whole = memoryview(piece)
            piece = whole[:size]
            waiting.appendleft(whole[size:])
        pieces.append(piece)
        size -= len(piece)
    return pieces
