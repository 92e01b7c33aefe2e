"""`Stream`: one request and its response on a connection (RFC 9113, sections 5.1 and 6.9), and who is told about it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gateway.http2.faults import FaultCode, StreamFault
from gateway.http2.frames import MAX_WINDOW, Flag, FrameType, frame_head, rst_stream, window_update
from gateway.http2.headers import RequestHead
from gateway.progress import Progress
from runtime.containment import contained

if TYPE_CHECKING:
    from gateway.http2.connection import Connection

STREAM_WINDOW_BYTES = 4 * 1024 * 1024
"""How much of a request may be on its way; granted anew when half of it has come, so that it can't be exceeded."""

_NOTHING: deque[bytes | memoryview] = deque()
_HEADERS = int(FrameType.HEADERS)
_DATA = int(FrameType.DATA)
_NOT_LAST = int(Flag.END_HEADERS)
_LAST = int(Flag.END_HEADERS | Flag.END_STREAM)


class Exchange(Protocol):
    """What happens on one stream; it may send from within any of these calls. An exception in one ends the stream."""

    def begin(self) -> None:
        """The stream is open."""

    def receive(self, data: bytes | memoryview) -> None:
        """The next bytes of the request; a view keeps all that was read with it."""

    def end(self) -> None:
        """The request is complete."""

    def drained(self) -> None:
        """All data that had to be kept has been sent, and the response goes on."""

    def check_progress(self, now_s: float) -> None:
        """Called every few seconds while no data is kept: ends the stream if a message of the request has stalled."""

    def closed(self) -> None:
        """Called once, at the end: the response is on its way, or nobody wants it any more. Nothing can be sent."""


class Application(Protocol):
    """What serves the requests of connections."""

    def interpret(self, head: RequestHead) -> Any:
        """What a request's head means to the application; shared by requests whose heads are the same."""

    def open(self, stream: Stream, meaning: Any) -> Exchange:
        """The exchange for a request whose head has this meaning; nothing can be sent yet."""


class Stream:
    """See the module. What the peer sends is passed on to the `exchange`; `window` is what the peer takes.

    `unsent_bytes` of data are kept until the peer takes them; `is_queued` belongs to `Output`. While it is on hold, the
    peer may send what it was granted before, and is granted no more.
    """

    __slots__ = (
        "_grant_left",
        "_is_on_hold",
        "_kept",
        "_output",
        "_progress",
        "_request_complete",
        "_sent_kept_bytes",
        "_trailers",
        "connection",
        "exchange",
        "id",
        "is_closed",
        "is_queued",
        "unsent_bytes",
        "window",
    )

    exchange: Exchange

    def __init__(self, connection: Connection, stream_id: int, window: int) -> None:
        self._grant_left = STREAM_WINDOW_BYTES
        self._is_on_hold = False
        self._kept: deque[bytes | memoryview] = _NOTHING
        self._output = connection.output
        self._progress: Progress | None = None
        self._request_complete = False
        self._sent_kept_bytes = 0
        self._trailers = b""
        self.connection = connection
        self.id = stream_id
        self.is_closed = False
        self.is_queued = False
        self.unsent_bytes = 0
        self.window = window

    # What the peer sends

    def receive(self, data: bytes | memoryview, flow_bytes: int, is_last: bool) -> None:
        """DATA came, of `flow_bytes` with its padding. Raises StreamFault where it must not come."""
        if self._request_complete:
            raise StreamFault(FaultCode.STREAM_CLOSED)
        self._grant_left -= flow_bytes
        if self._grant_left < 0:
            raise StreamFault(FaultCode.FLOW_CONTROL_ERROR)
        if data:
            self._pass_on(data)
        if is_last:
            self.end()
        elif self._grant_left < STREAM_WINDOW_BYTES // 2 and not self._is_on_hold:
            self._grant()

    def end(self) -> None:
        """The request ended. Raises StreamFault if it had ended before."""
        if self._request_complete:
            raise StreamFault(FaultCode.STREAM_CLOSED)
        self._request_complete = True
        if not self.is_closed:
            self._pass_on_end()

    @contained(on_error="_reset_after", passes=(StreamFault,))
    def begin(self, application: Application, meaning: Any) -> None:
        """Opens the exchange of this stream, whose request begins with `meaning`. Raises StreamFault."""
        self.exchange = application.open(self, meaning)
        self.exchange.begin()

    @contained(on_error="_reset_after", passes=(StreamFault,))
    def _pass_on(self, data: bytes | memoryview) -> None:
        self.exchange.receive(data)

    @contained(on_error="_reset_after", passes=(StreamFault,))
    def _pass_on_end(self) -> None:
        self.exchange.end()

    def _reset_after(self, _error: Exception, *_arguments: object) -> None:
        """An exchange has raised what no code foresaw: its stream ends, the others of the connection go on."""
        self.reset(FaultCode.INTERNAL_ERROR)

    def widen(self, increment: int) -> None:
        """The peer takes `increment` more bytes. Raises StreamFault where that is more than there can be (6.9.1)."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise StreamFault(FaultCode.FLOW_CONTROL_ERROR)
        if self.unsent_bytes and self.window > 0:
            self._output.enqueue(self)

    # What the application does

    def hold(self) -> None:
        """Grants the peer no more of its request, until `go_on`."""
        self._is_on_hold = True

    def go_on(self) -> None:
        """Grants again what the peer has used."""
        self._is_on_hold = False
        if self._grant_left < STREAM_WINDOW_BYTES // 2 and not self._request_complete:
            self._grant()

    def send(self, headers: bytes = b"", data: Sequence[bytes] = (), trailers: bytes = b"") -> bool:
        """Sends the parts of a response that are given, in this order; `headers` and `trailers` are header blocks.

        Trailers end the stream; given alone at first, they are all of the response. Data that the peer can't take yet
        is kept. Sending on a closed stream, or after trailers, does nothing. Returns False, and sends nothing, where the
        connection may keep no more data.
        """
        if self.is_closed or self._trailers:
            return True
        size = sum(map(len, data))
        parts: list[bytes] = []
        if headers:
            parts += (frame_head(len(headers), _HEADERS, _NOT_LAST, self.id), headers)
        keeps = self.unsent_bytes > 0 or (size > 0 and (size > self.window or not self._output.takes(size)))
        if keeps:
            if not self._output.keep(size):
                return False
        else:
            if size:
                self.window -= size
                self._output.window -= size
                self._output.turn_bytes += size
                parts += (frame_head(size, _DATA, 0, self.id), *data)
            if trailers:
                parts += (frame_head(len(trailers), _HEADERS, _LAST, self.id), trailers)
        if parts:
            self.connection.respond(*parts)
        if keeps:
            self._keep(data, size, trailers)
        elif trailers:
            self._finish()
        return True

    @contained(on_error="_reset_after")
    def check_progress(self, now_s: float, unread_period_s: float) -> None:
        """Ends the stream if its client reads too little of the response in `unread_period_s`, or its request stalled."""
        if not self.unsent_bytes:
            self._progress = None
            self.exchange.check_progress(now_s)
            return
        if self._progress is None:
            self._progress = Progress()
        if self._progress.is_stalled(now_s, self, self._sent_kept_bytes, unread_period_s):
            self.reset(FaultCode.ENHANCE_YOUR_CALM)

    def reset(self, code: FaultCode) -> None:
        """Ends the stream at once, whatever was or was not sent."""
        if not self.is_closed:
            self._output.write(rst_stream(self.id, code))
            self.abort()

    def abort(self) -> None:
        """The stream is over without its response having been sent."""
        if not self.is_closed:
            self._output.release(self.unsent_bytes)
            self.unsent_bytes = 0
            self._kept = _NOTHING
            self._close()

    def send_kept(self, limit: int) -> int:
        """Sends a frame with at most `limit` bytes of kept data, and the trailers after the last; the bytes sent."""
        size = min(limit, self.window, self.unsent_bytes)
        if size <= 0:
            return 0
        self.window -= size
        self.unsent_bytes -= size
        self._output.window -= size
        self._sent_kept_bytes += size
        self._output.release(size)
        self.connection.respond(frame_head(size, _DATA, 0, self.id), *self._take(size))
        if not self.unsent_bytes:
            self._kept = _NOTHING
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
            self._output.write(window_update(self.id, STREAM_WINDOW_BYTES - self._grant_left))
            self._grant_left = STREAM_WINDOW_BYTES

    def _keep(self, data: Sequence[bytes], size: int, trailers: bytes) -> None:
        if not self.unsent_bytes:
            self._kept = deque()
        self._kept += data
        self._trailers = trailers
        self.unsent_bytes += size
        if self.window > 0:
            self._output.enqueue(self)

    def _take(self, size: int) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        while size:
            piece = self._kept.popleft()
            if len(piece) > size:
                whole = memoryview(piece)
                piece = whole[:size]
                self._kept.appendleft(whole[size:])
            pieces.append(piece)
            size -= len(piece)
        return pieces

    def _finish(self) -> None:
        if not self._request_complete:
            # The rest of the request is not wanted (RFC 9113, section 8.1).
            self._output.write(rst_stream(self.id, FaultCode.NO_ERROR))
        self._close()

    def _close(self) -> None:
        self.is_closed = True
        self.connection.forget(self)
        self._exchange_closed()

    @contained(on_error="_close_exchange_again")
    def _exchange_closed(self) -> None:
        if hasattr(self, "exchange"):  # else the application has failed to open one
            self.exchange.closed()

    def _close_exchange_again(self, _error: Exception) -> None:
        """Tries once more: an exchange that is not closed keeps its memory, and the server from stopping."""
        self.exchange.closed()
