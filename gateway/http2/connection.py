"""`Connection`: the server's side of one HTTP/2 connection (RFC 9113), without I/O.

`receive` takes the bytes of the peer; `send_buffer` holds the bytes for it. Requests go to the application, which sends
responses on streams. Guarantees: nothing a peer sends makes `receive` raise; what a peer can make the connection hold is
bounded (the number of streams, the size of header blocks, and requests by what the application admits); the connection of
an abusive peer ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from weir.access.gate import CertificateNames, Kept
from weir.gateway.http2 import frames
from weir.gateway.http2.abuse_guard import AbuseGuard
from weir.gateway.http2.frames import (
    MAX_WINDOW,
    PREFACE,
    Flag,
    FrameReader,
    FrameType,
    Http2ConnectionError,
    Http2ErrorCode,
    Http2StreamError,
    Setting,
)
from weir.gateway.http2.headers import HeaderDecoder
from weir.gateway.http2.options import Http2Options
from weir.gateway.http2.send_buffer import DEFAULT_WINDOW_BYTES, MAX_SENT_FRAME_BYTES, SendBuffer
from weir.gateway.http2.stream import STREAM_WINDOW_BYTES, Application, Stream
from weir.http_server.stall_detection import StallDetector
from weir.runtime.containment import report

MAX_STREAMS = 1000
MAX_HEADER_BLOCK_BYTES = 64 * 1024
ADVERTISED_HEADER_LIST_BYTES = 16 * 1024

TURN_WORK = 1000
"""Frames, and work of header blocks (`HeaderDecoder.work`), in a turn of the event loop: about ten milliseconds."""

CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
"""The flow-control window of all requests together; granted again as `STREAM_WINDOW_BYTES` is."""

_HEADERS = "grpc"
_DRAIN_PING = b"draining"
_PAYLOAD_EXTRAS = int(Flag.PADDED | Flag.PRIORITY)
_CONTINUATION = int(FrameType.CONTINUATION)
_END_STREAM = int(Flag.END_STREAM)
_END_HEADERS = int(Flag.END_HEADERS)
_PADDED = int(Flag.PADDED)

_SETTINGS = frames.settings(
    {
        Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: ADVERTISED_HEADER_LIST_BYTES,
    }
)

_Payload = bytes | memoryview
_Handler = Callable[[int, int, _Payload], None]


class Connection:
    """One connection. `send_buffer` takes the bytes for the peer; `clock` returns monotonic seconds.

    The application counts in `buffered_bytes` what it holds of incomplete requests. `has_responded` is set when part of a
    response is sent; `KeepaliveManager` clears it. `certificate` is that of the client, if it has shown one.
    """

    certificate: CertificateNames | None = None
    kept: Kept | None = None
    """What its latest request for inference was admitted by."""

    def __init__(
        self, application: Application, options: Http2Options, clock: Callable[[], float], send_buffer: SendBuffer
    ) -> None:
        self._application = application
        self._headers = HeaderDecoder(application.interpret)
        self._frames = FrameReader()
        self.streams: dict[int, Stream] = {}
        self._guard = AbuseGuard(options, clock, self.streams)
        self._preface: bytes | None = b""
        self._handlers: tuple[_Handler, ...] = tuple(
            self._on_first_settings if kind is FrameType.SETTINGS else self._on_first_frame for kind in FrameType
        )
        self._last_stream_id = 0
        self._block: bytearray | None = None  # of the headers that CONTINUATION frames continue
        self._block_progress = StallDetector()
        self._block_stream_id = 0
        self._block_flags = 0
        self._grant_left = CONNECTION_WINDOW_BYTES
        self._stream_window = DEFAULT_WINDOW_BYTES
        self._is_draining = False
        self._is_refusing = False
        self._unread: Iterator[frames.Frame] = iter(())
        self._work_left = TURN_WORK  # until others have a turn; of several reads in one
        self.is_behind = False
        """Whether frames of what was received are left for `proceed`."""
        self.buffered_bytes = 0
        self.has_responded = False
        self.is_closed = False
        self.has_handshake = False
        self.send_buffer = send_buffer
        send_buffer.write(_SETTINGS, frames.window_update(0, CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES))

    def receive(self, data: bytes) -> None:
        """Takes bytes of the peer, and processes as much of them as `proceed`. Never raises."""
        arrived = self._frames.feed(data) if self._preface is None else self._first_frames(data)
        if self.is_behind:
            self._unread = itertools.chain(self._unread, arrived)
        else:
            self._unread = arrived
            self.proceed()

    def proceed(self) -> None:
        """Processes frames that were received: a turn's work of them. Never raises."""
        if self.is_closed:
            return
        self.is_behind = False
        work_left = self._work_left
        try:
            for kind, flags, stream_id, payload in self._unread:
                self._on_frame(kind, flags, stream_id, payload)
                if self.is_closed:
                    return
                work_left -= 1
                if work_left <= self._headers.work:
                    self.is_behind = True
                    work_left = TURN_WORK + self._headers.work
                    return
        except Http2ConnectionError as error:
            self.close(error.code, error.reason)
        except Exception as error:  # noqa: BLE001 - reported; what follows can't be framed, or decoded, any more
            report("weir.gateway.http2.connection: reading a frame", error)
            self.close(Http2ErrorCode.INTERNAL_ERROR, "internal server error")
        finally:
            self._work_left = work_left

    def ping(self, payload: bytes) -> None:
        """Sends a PING; `payload` has eight bytes."""
        self.send_buffer.write(frames.ping(payload))

    def drain(self) -> None:
        """Tells the peer to open no more streams; the connection closes with the last open one (section 6.8)."""
        if not (self._is_draining or self.is_closed):
            self._is_draining = True
            # Streams that the peer opens before it answers the ping are still served.
            self.send_buffer.write(frames.goaway(MAX_WINDOW, Http2ErrorCode.NO_ERROR), frames.ping(_DRAIN_PING))

    @property
    def is_drained(self) -> bool:
        """Whether the peer has acknowledged `drain`: it opens no more streams."""
        return self._is_refusing or self.is_closed

    @property
    def has_had_streams(self) -> bool:
        """Whether the peer has opened a stream."""
        return self._last_stream_id > 0

    def close(self, code: Http2ErrorCode = Http2ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Ends the connection and all its streams."""
        if not self.is_closed:
            self.send_buffer.write(frames.goaway(self._last_stream_id, code, reason))
            self.lose()

    def lose(self) -> None:
        """Ends all streams: the peer has disconnected, or the connection is being closed."""
        self.is_closed = True
        for stream in list(self.streams.values()):
            stream.abort()

    # Called by streams

    def respond(self, *pieces: _Payload) -> None:
        """Writes a part of a response."""
        self._guard.responded = self.has_responded = True
        self.send_buffer.write(*pieces)

    def grant(self) -> None:
        """Widens the peer's window once half of it is used, provided that the peer reads its responses."""
        if self._grant_left < CONNECTION_WINDOW_BYTES // 2 and not (self.is_closed or self.send_buffer.is_crowded):
            self.send_buffer.write(frames.window_update(0, CONNECTION_WINDOW_BYTES - self._grant_left))
            self._grant_left = CONNECTION_WINDOW_BYTES

    def check_progress(self, now_s: float, unread_period_s: float) -> None:
        """Ends the streams whose client has stopped sending the request, or reading the response."""
        if self._block is None:
            self._block_progress.reset()
        elif self._block_progress.is_stalled(now_s, len(self._block)):
            self.close(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header block stopped arriving")
        for stream in list(self.streams.values()):
            stream.check_progress(now_s, unread_period_s)

    def forget(self, stream: Stream) -> None:
        """Removes `stream`, which is closed."""
        self.streams.pop(stream.id, None)
        self.grant()
        if self._is_refusing and not self.streams:
            self.close()

    # Frames

    def _first_frames(self, data: bytes) -> Iterator[frames.Frame]:
        yield from self._frames.feed(self._read_preface(data))

    def _read_preface(self, data: bytes) -> bytes:
        """The rest of `data` after the preface (section 3.4)."""
        data = (self._preface or b"") + data
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 connection preface")
        if len(data) < len(PREFACE):
            self._preface = data
            return b""
        self._preface = None
        return data[len(PREFACE) :]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: _Payload) -> None:
        if self._block is not None and kind != _CONTINUATION:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if kind >= len(self._handlers):
            self._guard.count_idle_frame()  # of an extension: ignored (section 5.5)
            return
        try:
            self._handlers[kind](flags, stream_id, payload)
        except Http2StreamError as error:
            self._guard.count_reset()
            stream = self.streams.get(stream_id)
            if stream is not None:
                stream.reset(error.code)
            else:
                self.send_buffer.write(frames.rst_stream(stream_id, error.code))

    def _on_first_frame(self, _flags: int, _stream_id: int, _payload: _Payload) -> None:
        raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "the first frame was not SETTINGS")

    def _on_first_settings(self, flags: int, stream_id: int, payload: _Payload) -> None:
        self._handlers = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_rst_stream,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )
        self._on_settings(flags, stream_id, payload)
        self.has_handshake = True

    def _on_headers(self, flags: int, stream_id: int, payload: _Payload) -> None:
        if flags & _PAYLOAD_EXTRAS:
            payload = _without_extras(payload, flags)
        if flags & _END_HEADERS:
            self._on_block(stream_id, bytes(payload), flags)
        else:
            self._charge_block(len(payload))
            self._block = bytearray(payload)
            self._block_progress.reset()
            self._block_stream_id = stream_id
            self._block_flags = flags

    def _on_continuation(self, flags: int, stream_id: int, payload: _Payload) -> None:
        self._guard.count_idle_frame()
        if self._block is None or stream_id != self._block_stream_id:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._charge_block(len(payload))
        self._block += payload
        if len(self._block) > MAX_HEADER_BLOCK_BYTES:
            raise Http2ConnectionError(Http2ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large")
        if flags & _END_HEADERS:
            block, self._block = bytes(self._block), None
            self.send_buffer.account.release(_HEADERS, len(block))
            self._on_block(stream_id, block, self._block_flags)

    def _charge_block(self, size: int) -> None:
        """Charges a part of a header block that comes in several frames."""
        if not self.send_buffer.account.charge(_HEADERS, size):
            raise Http2ConnectionError(
                Http2ErrorCode.ENHANCE_YOUR_CALM, "the server holds too many unfinished requests"
            )

    def _on_block(self, stream_id: int, block: bytes, flags: int) -> None:
        if not stream_id & 1:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream with an even identifier")
        if stream_id <= self._last_stream_id:
            self._on_trailers(stream_id, block, flags)
            return
        if not self._is_refusing:
            self._last_stream_id = stream_id
        meaning = self._headers.request(block)
        if self._is_refusing:
            self._guard.count_idle_frame()
            return
        if len(self.streams) >= MAX_STREAMS:
            raise Http2StreamError(Http2ErrorCode.REFUSED_STREAM)
        stream = self.streams[stream_id] = Stream(self, stream_id, self._stream_window)
        stream.begin(self._application, meaning)
        if flags & _END_STREAM and not stream.is_closed:
            stream.end()

    def _on_trailers(self, stream_id: int, block: bytes, flags: int) -> None:
        trailers = self._headers.fields(block)
        stream = self.streams.get(stream_id)
        if stream is None:
            self._guard.count_idle_frame()  # it may have been sent before RST_STREAM arrived (section 5.1)
        elif not flags & _END_STREAM or any(name.startswith(b":") for name, _ in trailers):
            raise Http2StreamError(Http2ErrorCode.PROTOCOL_ERROR)
        else:
            stream.end()

    def _on_data(self, flags: int, stream_id: int, payload: _Payload) -> None:
        size = len(payload)
        self._grant_left -= size
        if self._grant_left < 0:
            raise Http2ConnectionError(Http2ErrorCode.FLOW_CONTROL_ERROR, "data exceeds the window of the connection")
        self.grant()
        if flags & _PADDED:
            payload = _without_extras(payload, _PADDED)
        stream = self.streams.get(stream_id)
        if stream is None or not (payload or flags & _END_STREAM):
            self._guard.count_idle_frame()
        if stream is not None:
            stream.receive(payload, size, bool(flags & _END_STREAM))
        else:
            self._check_was_open(stream_id)

    def _on_priority(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        self._guard.count_idle_frame()
        if not stream_id:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            raise Http2StreamError(Http2ErrorCode.FRAME_SIZE_ERROR)

    def _on_rst_stream(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        _check_size(payload, 4)
        self._check_was_open(stream_id)
        self._guard.count_reset()
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.abort()

    def _on_push_promise(self, _flags: int, _stream_id: int, _payload: _Payload) -> None:
        raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_window_update(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        self._guard.count_idle_frame()
        _check_size(payload, 4)
        increment = frames.read_uint31(payload)
        if not stream_id:
            if not increment:
                raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE with an increment of 0")
            self.send_buffer.widen(increment)
            return
        self._check_was_open(stream_id)
        if not increment:
            raise Http2StreamError(Http2ErrorCode.PROTOCOL_ERROR)
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.widen(increment)

    def _on_settings(self, flags: int, stream_id: int, payload: _Payload) -> None:
        self._guard.count_idle_frame()
        if stream_id:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & Flag.ACK:
            _check_size(payload, 0)
            return
        if len(payload) % 6:
            raise Http2ConnectionError(Http2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        for setting, value in frames.read_settings(payload):
            self._on_setting(setting, value)
        self.send_buffer.write(frames.SETTINGS_ACK)

    def _on_setting(self, setting: int, value: int) -> None:
        # The other settings don't matter to a server without pushes and without a dynamic header table.
        if setting == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise Http2ConnectionError(Http2ErrorCode.FLOW_CONTROL_ERROR, "an initial window that is too large")
            self._change_windows(value)
        elif setting == Setting.MAX_FRAME_SIZE:
            if not frames.MAX_FRAME_BYTES <= value < 2**24:
                raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
            self.send_buffer.frame_bytes = min(value, MAX_SENT_FRAME_BYTES)
        elif setting == Setting.ENABLE_PUSH and value > 1:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")

    def _change_windows(self, size: int) -> None:
        """The windows of open streams change with the initial window, and may become negative (section 6.9.2)."""
        change, self._stream_window = size - self._stream_window, size
        for stream in self.streams.values():
            try:
                stream.widen(change)
            except Http2StreamError as error:
                raise Http2ConnectionError(error.code, "the window of a stream is too large") from error

    def _on_ping(self, flags: int, stream_id: int, payload: _Payload) -> None:
        if stream_id:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        _check_size(payload, 8)
        if not flags & Flag.ACK:
            self._guard.count_ping(bool(self.streams))
            self.send_buffer.write(frames.ping(bytes(payload), Flag.ACK))
        elif self._is_draining and payload == _DRAIN_PING:
            self._is_refusing = True
            if self.streams:
                self.send_buffer.write(frames.goaway(self._last_stream_id, Http2ErrorCode.NO_ERROR))
            else:
                self.close()
        else:
            self._guard.count_idle_frame()

    def _on_goaway(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        # The client opens no more streams, and closes the connection after the last response: nothing to do.
        self._guard.count_idle_frame()
        if stream_id:
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise Http2ConnectionError(Http2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of a wrong length")

    def _check_was_open(self, stream_id: int) -> None:
        if not stream_id & 1 or (stream_id > self._last_stream_id and not self._is_refusing):
            raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "a frame of a stream that was never opened")


def _check_size(payload: _Payload, size: int) -> None:
    if len(payload) != size:
        raise Http2ConnectionError(
            Http2ErrorCode.FRAME_SIZE_ERROR, f"the payload has {len(payload)} bytes, expected {size}"
        )


def _without_extras(payload: _Payload, flags: int) -> _Payload:
    """A payload without the padding (section 6.1) and the priority (6.2) that `flags` announce."""
    padding = 0
    if flags & Flag.PADDED:
        if not payload:
            raise Http2ConnectionError(Http2ErrorCode.FRAME_SIZE_ERROR, "the length of the padding is missing")
        padding, payload = payload[0], payload[1:]
    if flags & Flag.PRIORITY:
        if len(payload) < 5:
            raise Http2ConnectionError(Http2ErrorCode.FRAME_SIZE_ERROR, "the priority is missing")
        payload = payload[5:]
    if padding > len(payload):
        raise Http2ConnectionError(Http2ErrorCode.PROTOCOL_ERROR, "the padding exceeds the payload")
    return payload[: len(payload) - padding]
