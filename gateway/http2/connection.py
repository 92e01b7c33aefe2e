"""`Connection`: the server's side of one HTTP/2 connection (RFC 9113), without I/O.

Bytes of the peer go in by `receive`, bytes for it are put into `output`; in between, requests go to the application and
its responses come back. Promises: nothing a peer sends makes `receive` raise; what a peer can make it hold is bounded
(streams by their number, header blocks by their size, requests by what the application admits); a peer that only makes
work is sent away.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.http2 import frames
from gateway.http2.conduct import Conduct
from gateway.http2.faults import ConnectionFault, FaultCode, StreamFault
from gateway.http2.frames import MAX_WINDOW, PREFACE, Flag, FrameReader, FrameType, Setting
from gateway.http2.headers import HeaderDecoder
from gateway.http2.options import Http2Options
from gateway.http2.output import DEFAULT_WINDOW_BYTES, MAX_SENT_FRAME_BYTES, Output
from gateway.http2.stream import STREAM_WINDOW_BYTES, Application, Stream
from gateway.progress import Progress
from runtime.containment import report

MAX_STREAMS = 1000
MAX_HEADER_BLOCK_BYTES = 64 * 1024
ADVERTISED_HEADER_LIST_BYTES = 16 * 1024

CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
"""How much of all requests together may be on its way; granted anew as `STREAM_WINDOW_BYTES` is."""

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
    """See the module. `output` is what the peer is to be sent; `clock` tells monotonic seconds.

    `buffered_bytes` is the application's: what it holds of requests that are not complete. `has_responded` is set when
    something of a response is sent, for whoever clears it.
    """

    def __init__(
        self, application: Application, options: Http2Options, clock: Callable[[], float], output: Output
    ) -> None:
        self._application = application
        self._headers = HeaderDecoder(application.interpret)
        self._frames = FrameReader()
        self.streams: dict[int, Stream] = {}
        self._conduct = Conduct(options, clock, self.streams)
        self._preface: bytes | None = b""
        self._handlers: tuple[_Handler, ...] = tuple(
            self._on_first_settings if kind is FrameType.SETTINGS else self._on_first_frame for kind in FrameType
        )
        self._last_stream_id = 0
        self._block: bytearray | None = None  # of the headers that CONTINUATION frames go on with
        self._block_progress = Progress()
        self._block_stream_id = 0
        self._block_flags = 0
        self._grant_left = CONNECTION_WINDOW_BYTES
        self._stream_window = DEFAULT_WINDOW_BYTES
        self._is_draining = False
        self._is_refusing = False
        self.buffered_bytes = 0
        self.has_responded = False
        self.is_closed = False
        self.is_greeted = False
        self.output = output
        output.write(_SETTINGS, frames.window_update(0, CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES))

    def receive(self, data: bytes) -> None:
        """Takes bytes of the peer."""
        if self.is_closed:
            return
        try:
            if self._preface is not None:
                data = self._read_preface(data)
            for kind, flags, stream_id, payload in self._frames.feed(data):
                self._on_frame(kind, flags, stream_id, payload)
                if self.is_closed:
                    return
        except ConnectionFault as fault:
            self.close(fault.code, fault.reason)
        except Exception as error:  # noqa: BLE001 - reported; what follows can't be framed, or decoded, any more
            report("gateway.http2.connection: reading a frame", error)
            self.close(FaultCode.INTERNAL_ERROR, "internal server error")

    def ping(self, payload: bytes) -> None:
        """Asks the peer for a sign of life; `payload` has eight bytes."""
        self.output.write(frames.ping(payload))

    def drain(self) -> None:
        """Asks the peer to open no more streams; the connection closes with the last of those it has (6.8)."""
        if not (self._is_draining or self.is_closed):
            self._is_draining = True
            # Streams that are on their way are served still: those that were opened before the ping is answered.
            self.output.write(frames.goaway(MAX_WINDOW, FaultCode.NO_ERROR), frames.ping(_DRAIN_PING))

    def close(self, code: FaultCode = FaultCode.NO_ERROR, reason: str = "") -> None:
        """Ends the connection and all that happens on it."""
        if not self.is_closed:
            self.output.write(frames.goaway(self._last_stream_id, code, reason))
            self.lose()

    def lose(self) -> None:
        """The peer has gone, or is to be left: everything ends that happens on the connection."""
        self.is_closed = True
        for stream in list(self.streams.values()):
            stream.abort()

    # What streams ask of their connection

    def respond(self, *pieces: _Payload) -> None:
        """Puts out a part of a response."""
        self._conduct.responded = self.has_responded = True
        self.output.write(*pieces)

    def grant(self) -> None:
        """Grants the peer more of its requests, when it has used half of what it was granted and reads its responses."""
        if self._grant_left < CONNECTION_WINDOW_BYTES // 2 and not (self.is_closed or self.output.is_crowded):
            self.output.write(frames.window_update(0, CONNECTION_WINDOW_BYTES - self._grant_left))
            self._grant_left = CONNECTION_WINDOW_BYTES

    def check_progress(self, now_s: float, unread_period_s: float) -> None:
        """Ends the streams whose client has stopped sending its request, or reading its response."""
        if self._block is None:
            self._block_progress.reset()
        elif self._block_progress.is_stalled(now_s, self, len(self._block)):
            self.close(FaultCode.ENHANCE_YOUR_CALM, "a header block stopped arriving")
        for stream in list(self.streams.values()):
            stream.check_progress(now_s, unread_period_s)

    def forget(self, stream: Stream) -> None:
        """`stream` is closed."""
        self.streams.pop(stream.id, None)
        self.grant()
        if self._is_refusing and not self.streams:
            self.close()

    # Frames

    def _read_preface(self, data: bytes) -> bytes:
        """What is left of `data` after the preface (section 3.4)."""
        data = (self._preface or b"") + data
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "this is no HTTP/2")
        if len(data) < len(PREFACE):
            self._preface = data
            return b""
        self._preface = None
        return data[len(PREFACE) :]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: _Payload) -> None:
        if self._block is not None and kind != _CONTINUATION:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a header block was interrupted")
        if kind >= len(self._handlers):
            self._conduct.count_idle_frame()  # an extension's: ignored (section 5.5)
            return
        try:
            self._handlers[kind](flags, stream_id, payload)
        except StreamFault as fault:
            self._conduct.count_reset()
            stream = self.streams.get(stream_id)
            if stream is not None:
                stream.reset(fault.code)
            else:
                self.output.write(frames.rst_stream(stream_id, fault.code))

    def _on_first_frame(self, _flags: int, _stream_id: int, _payload: _Payload) -> None:
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "the first frame was not SETTINGS")

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
        self.is_greeted = True

    def _on_headers(self, flags: int, stream_id: int, payload: _Payload) -> None:
        if flags & _PAYLOAD_EXTRAS:
            payload = _without_extras(payload, flags)
        if flags & _END_HEADERS:
            self._on_block(stream_id, bytes(payload), flags)
        else:
            self._charge_block(len(payload))
            self._block = bytearray(payload)
            self._block_stream_id = stream_id
            self._block_flags = flags

    def _on_continuation(self, flags: int, stream_id: int, payload: _Payload) -> None:
        self._conduct.count_idle_frame()
        if self._block is None or stream_id != self._block_stream_id:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._charge_block(len(payload))
        self._block += payload
        if len(self._block) > MAX_HEADER_BLOCK_BYTES:
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "the header block is too large")
        if flags & _END_HEADERS:
            block, self._block = bytes(self._block), None
            self.output.account.release(_HEADERS, len(block))
            self._on_block(stream_id, block, self._block_flags)

    def _charge_block(self, size: int) -> None:
        """Charges a part of a header block that takes several frames."""
        if not self.output.account.charge(_HEADERS, size):
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "the server holds too many unfinished requests")

    def _on_block(self, stream_id: int, block: bytes, flags: int) -> None:
        if not stream_id & 1:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "HEADERS on a stream that is not a client's")
        if stream_id <= self._last_stream_id:
            self._on_trailers(stream_id, block, flags)
            return
        if not self._is_refusing:
            self._last_stream_id = stream_id
        meaning = self._headers.request(block)
        if self._is_refusing:
            self._conduct.count_idle_frame()
            return
        if len(self.streams) >= MAX_STREAMS:
            raise StreamFault(FaultCode.REFUSED_STREAM)
        stream = self.streams[stream_id] = Stream(self, stream_id, self._stream_window)
        stream.begin(self._application, meaning)
        if flags & _END_STREAM and not stream.is_closed:
            stream.end()

    def _on_trailers(self, stream_id: int, block: bytes, flags: int) -> None:
        trailers = self._headers.fields(block)
        stream = self.streams.get(stream_id)
        if stream is None:
            self._conduct.count_idle_frame()  # it may have been sent before our RST_STREAM came (section 5.1)
        elif not flags & _END_STREAM or any(name.startswith(b":") for name, _ in trailers):
            raise StreamFault(FaultCode.PROTOCOL_ERROR)
        else:
            stream.end()

    def _on_data(self, flags: int, stream_id: int, payload: _Payload) -> None:
        size = len(payload)
        self._grant_left -= size
        if self._grant_left < 0:
            raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, "more data than the connection was granted")
        self.grant()
        if flags & _PADDED:
            payload = _without_extras(payload, _PADDED)
        stream = self.streams.get(stream_id)
        if stream is None or not (payload or flags & _END_STREAM):
            self._conduct.count_idle_frame()
        if stream is not None:
            stream.receive(payload, size, bool(flags & _END_STREAM))
        else:
            self._check_was_open(stream_id)

    def _on_priority(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        self._conduct.count_idle_frame()
        if not stream_id:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PRIORITY of no stream")
        if len(payload) != 5:
            raise StreamFault(FaultCode.FRAME_SIZE_ERROR)

    def _on_rst_stream(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        _check_size(payload, 4)
        self._check_was_open(stream_id)
        self._conduct.count_reset()
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.abort()

    def _on_push_promise(self, _flags: int, _stream_id: int, _payload: _Payload) -> None:
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _on_window_update(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        self._conduct.count_idle_frame()
        _check_size(payload, 4)
        increment = frames.read_word(payload)
        if not stream_id:
            if not increment:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of nothing")
            self.output.widen(increment)
            return
        self._check_was_open(stream_id)
        if not increment:
            raise StreamFault(FaultCode.PROTOCOL_ERROR)
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.widen(increment)

    def _on_settings(self, flags: int, stream_id: int, payload: _Payload) -> None:
        self._conduct.count_idle_frame()
        if stream_id:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & Flag.ACK:
            _check_size(payload, 0)
            return
        if len(payload) % 6:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        for setting, value in frames.read_settings(payload):
            self._on_setting(setting, value)
        self.output.write(frames.SETTINGS_ACK)

    def _on_setting(self, setting: int, value: int) -> None:
        # The others mean nothing to a server that pushes nothing and whose header blocks use no dynamic table.
        if setting == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, "an initial window that is too large")
            self._change_windows(value)
        elif setting == Setting.MAX_FRAME_SIZE:
            if not frames.MAX_FRAME_BYTES <= value < 2**24:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a largest frame that can't be")
            self.output.frame_bytes = min(value, MAX_SENT_FRAME_BYTES)
        elif setting == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")

    def _change_windows(self, size: int) -> None:
        """The windows of open streams change with the initial one, and can so become negative (section 6.9.2)."""
        change, self._stream_window = size - self._stream_window, size
        for stream in self.streams.values():
            try:
                stream.widen(change)
            except StreamFault as fault:
                raise ConnectionFault(fault.code, "the window of a stream is too large") from fault

    def _on_ping(self, flags: int, stream_id: int, payload: _Payload) -> None:
        if stream_id:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PING of a stream")
        _check_size(payload, 8)
        if not flags & Flag.ACK:
            self._conduct.count_ping(bool(self.streams))
            self.output.write(frames.ping(bytes(payload), Flag.ACK))
        elif self._is_draining and payload == _DRAIN_PING:
            self._is_refusing = True
            if self.streams:
                self.output.write(frames.goaway(self._last_stream_id, FaultCode.NO_ERROR))
            else:
                self.close()
        else:
            self._conduct.count_idle_frame()

    def _on_goaway(self, _flags: int, stream_id: int, payload: _Payload) -> None:
        # The client opens no more streams and closes the connection when it has its answers: nothing to do.
        self._conduct.count_idle_frame()
        if stream_id:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "GOAWAY of a wrong length")

    def _check_was_open(self, stream_id: int) -> None:
        if not stream_id & 1 or (stream_id > self._last_stream_id and not self._is_refusing):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a frame of a stream that was never opened")


def _check_size(payload: _Payload, size: int) -> None:
    if len(payload) != size:
        raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, f"{len(payload)} bytes in place of {size}")


def _without_extras(payload: _Payload, flags: int) -> _Payload:
    """A payload without its padding (section 6.1) and its priority (6.2), as far as `flags` say that it has them."""
    padding = 0
    if flags & Flag.PADDED:
        if not payload:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "no length of the padding")
        padding, payload = payload[0], payload[1:]
    if flags & Flag.PRIORITY:
        if len(payload) < 5:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "no room for the priority")
        payload = payload[5:]
    if padding > len(payload):
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "more padding than there is")
    return payload[: len(payload) - padding]
