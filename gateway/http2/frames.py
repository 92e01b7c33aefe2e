"""The frames of HTTP/2 as bytes (RFC 9113, sections 4 and 6), and the errors of the protocol (sections 5.4 and 7).

Reading checks only the size of a frame; `Connection` checks the content and the order of frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends before its first frame (section 3.4)."""

MAX_FRAME_BYTES = 16_384
"""The largest payload we accept: the protocol's own default, and the least a peer must accept (section 4.2)."""

MAX_WINDOW = 2**31 - 1
"""The largest flow-control window, and the largest stream identifier (sections 6.9.1 and 5.1.1)."""

_HEAD = struct.Struct(">IBI")  # length and type share the first four bytes
_HEAD_BYTES = 9
_SETTING = struct.Struct(">HI")
_UINT32 = struct.Struct(">I")
_COPY_LIMIT_BYTES = 2048


class FrameType(IntEnum):
    """The frame types of RFC 9113, section 6."""

    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


class Flag(IntFlag):
    """Frame flags; END_STREAM (of DATA and HEADERS) and ACK (of SETTINGS and PING) are the same bit."""

    NONE = 0x0
    ACK = 0x1
    END_STREAM = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    """The settings of RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


Frame = tuple[int, int, int, bytes | memoryview]
"""Type, flags, stream identifier, payload; large payloads are views."""


class FrameReader:
    """Splits received bytes into frames; keeps the start of an incomplete frame (at most one frame's bytes)."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises Http2ConnectionError (FRAME_SIZE_ERROR) for one that is too large."""
        if self._rest:
            data = self._rest + data
        position, end = 0, len(data)
        while end - position >= _HEAD_BYTES:
            word, flags, stream_id = _HEAD.unpack_from(data, position)
            length = word >> 8
            if length > MAX_FRAME_BYTES:
                raise Http2ConnectionError(Http2ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            start = position + _HEAD_BYTES
            if start + length > end:
                break
            position = start + length
            payload = data[start:position] if length <= _COPY_LIMIT_BYTES else memoryview(data)[start:position]
            yield word & 0xFF, flags, stream_id & MAX_WINDOW, payload
        self._rest = data[position:]


def frame_head(length: int, frame_type: int, flags: int, stream_id: int) -> bytes:
    """The nine bytes before a payload of `length` bytes."""
    return _HEAD.pack(length << 8 | frame_type, flags, stream_id)


def settings(values: dict[Setting, int]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in values.items())
    return frame_head(len(payload), FrameType.SETTINGS, Flag.NONE, 0) + payload


SETTINGS_ACK = frame_head(0, FrameType.SETTINGS, Flag.ACK, 0)
"""The acknowledgement of a SETTINGS frame."""


def read_settings(payload: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """(identifier, value) of each setting of a SETTINGS payload whose length is a multiple of six."""
    return _SETTING.iter_unpack(payload)


def read_uint31(payload: bytes | memoryview) -> int:
    """The 31 bits of a four-byte payload (used for the error code of RST_STREAM too: larger ones don't exist)."""
    return int.from_bytes(payload, "big") & MAX_WINDOW


def ping(payload: bytes, flags: Flag = Flag.NONE) -> bytes:
    """A PING frame; `payload` has eight bytes."""
    return frame_head(8, FrameType.PING, flags, 0) + payload


def rst_stream(stream_id: int, code: Http2ErrorCode) -> bytes:
    """A RST_STREAM frame."""
    return frame_head(4, FrameType.RST_STREAM, Flag.NONE, stream_id) + _UINT32.pack(code)


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame_head(4, FrameType.WINDOW_UPDATE, Flag.NONE, stream_id) + _UINT32.pack(increment)


def goaway(last_stream_id: int, code: Http2ErrorCode, reason: str = "") -> bytes:
    """A GOAWAY frame: streams above `last_stream_id` were not processed."""
    debug = reason.encode()
    head = frame_head(8 + len(debug), FrameType.GOAWAY, Flag.NONE, 0)
    return head + _UINT32.pack(last_stream_id) + _UINT32.pack(code) + debug


class Http2ErrorCode(IntEnum):
    """The error codes of RST_STREAM and GOAWAY frames (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Http2ConnectionError(Exception):
    """An error that ends the connection with GOAWAY, which carries `reason` for the peer's log."""

    def __init__(self, code: Http2ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Http2StreamError(Exception):
    """An error that ends one stream with RST_STREAM; the others go on."""

    def __init__(self, code: Http2ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code
