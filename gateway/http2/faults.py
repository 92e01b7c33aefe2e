"""What a peer can do wrong: errors that end a stream, and errors that end the connection (RFC 9113, sections 5.4 and 7)."""

from __future__ import annotations

from enum import IntEnum


class FaultCode(IntEnum):
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


class ConnectionFault(Exception):
    """The connection can't go on: it ends with GOAWAY. `reason` is told to the peer, for its logs."""

    def __init__(self, code: FaultCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamFault(Exception):
    """One stream can't go on: it ends with RST_STREAM, the others are not disturbed."""

    def __init__(self, code: FaultCode) -> None:
        super().__init__(code.name)
        self.code = code
